"""A GGUF file with SentencePiece's vocabulary is read as SentencePiece itself reads its model."""

from __future__ import annotations

import random
from typing import Any

import pytest

sentencepiece = pytest.importorskip("sentencepiece")

from pagedkv.errors import UsageError  # noqa: E402
from pagedkv.runner.gguf_tokenizer import tokenizer_from_gguf  # noqa: E402
from pagedkv.runner.tokenizer import Tokenizer  # noqa: E402

CONTROL = ["<start_of_turn>", "<end_of_turn>"]
USER_DEFINED = ["<table>", "\n\n", "\N{LOWER ONE EIGHTH BLOCK}" * 2, "\N{LOWER ONE EIGHTH BLOCK}" * 3]
TEXTS = [
    "The harbour was quiet before the boats came in.",
    "the   boats,  the harbour    and      the lamps",
    " leading and trailing ",
    "",
    " ",
    "naïve café — “quotes” … ½ 五 日本語 😀 👩‍👩‍👧‍👦",
    "lines\nof\n\nthe\n\n\nharbour\t<table>boats</table>",
    "harbourharbourboatsboatslamps" * 3,
]


@pytest.fixture(scope="module", params=["with_prefix", "without_prefix"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    """Our tokenizer, from metadata as llama.cpp's converter writes them, and SentencePiece's."""
    prefix = request.param == "with_prefix"
    folder = tmp_path_factory.mktemp("spm")
    words = [*TEXTS[0].split(), "lamps", "and", "tide", "old", "rope", "of", "a", "keeper's", "1987"]
    rng = random.Random(3)
    lines = [" ".join(rng.choices(words, k=12)) for _ in range(400)]
    (folder / "corpus.txt").write_text("\n".join(lines), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "corpus.txt"),
        model_prefix=str(folder / "m"),
        model_type="bpe",
        vocab_size=420,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=prefix,
        control_symbols=CONTROL,
        user_defined_symbols=[] if prefix else USER_DEFINED,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    spm = sentencepiece.SentencePieceProcessor(model_file=str(folder / "m.model"))
    return tokenizer_from_gguf(metadata(spm, prefix), where="test.gguf"), spm


def metadata(spm: Any, prefix: bool) -> dict[str, Any]:
    def kind(index: int) -> int:
        if spm.is_unknown(index):
            return 2
        if spm.is_control(index):
            return 3
        if spm.is_byte(index):
            return 6
        return 4 if spm.id_to_piece(index) in USER_DEFINED else 1

    ids = range(spm.vocab_size())
    values = {
        "model": "llama",
        "pre": "default",
        "tokens": [spm.id_to_piece(index) for index in ids],
        "scores": [spm.get_score(index) for index in ids],
        "token_type": [kind(index) for index in ids],
        "bos_token_id": spm.bos_id(),
        "eos_token_id": spm.eos_id(),
        "add_space_prefix": prefix,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


@pytest.mark.parametrize("text", TEXTS)
def test_ids_equal_those_of_sentencepiece(both: tuple[Tokenizer, Any], text: str) -> None:
    ours, spm = both
    assert ours.encode(text) == [spm.bos_id(), *spm.encode(text)]
    ids = ours.encode(text, add_special_tokens=False)
    assert ours.decode(ids) == spm.decode(ids) == text
    stream = ours.stream()
    assert "".join([*map(stream.put, ids), stream.flush()]) == text


def test_control_tokens_written_out_are_recognised(both: tuple[Tokenizer, Any]) -> None:
    ours, spm = both
    start, end = map(spm.piece_to_id, CONTROL)
    ids = ours.encode("<start_of_turn>the boats<end_of_turn>", add_special_tokens=False)
    assert ids == [start, *spm.encode("the boats"), end]
    assert ours.decode(ids) == "the boats"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": [0.0]}, "tokenizer.ggml.scores: expected 2, one a token, got 1"),
        ({"token_type": []}, "tokenizer.ggml.token_type: expected 2, one a token, got 0"),
        ({}, "tokenizer.ggml.tokens: expected a token for every byte, got none for <0x00>"),
        ({"model": "t5"}, "tokenizer.ggml.model: expected 'gpt2' (byte-level BPE) or 'llama'"),
    ],
)
def test_vocabulary_that_is_not_whole_is_refused(changes: dict[str, Any], message: str) -> None:
    values = {"model": "llama", "tokens": ["a", "b"], "scores": [0.0, 0.0], "token_type": [1, 1], **changes}
    with pytest.raises(UsageError) as caught:
        tokenizer_from_gguf({f"tokenizer.ggml.{k}": v for k, v in values.items()}, where="test.gguf")
    assert message in str(caught.value)
