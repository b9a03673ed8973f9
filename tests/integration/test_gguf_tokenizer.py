"""The tokenizer built from the real model's GGUF file gives the ids of the one its makers published."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import pre_tokenizers

from pagedkv.runner.loader import LoadedModel
from pagedkv.runner.tokenizer import Tokenizer

transformers = pytest.importorskip("transformers")

TEXTS = [
    "The capital of France is Paris.",
    "It's 12345 apples, costing $3.50 in 2024!",
    "I'LL go; we're, they'd've",
    "def f(x):\n\treturn x**2  # comment\n\n\n    if True:\n        pass\n",
    "naïve café — “quotes” … ½ ² ٣٤ 五",
    "😀 👩‍👩‍👧‍👦 🇩🇪 e\u0301",
    "日本語のテキスト 한국어 العربية हिन्दी ไทย",
    "  leading and   multiple   spaces  \u00a0\u200b",
    "\r\n\r\nwindows\r\n\t tabs",
    "<|im_start|>user\nhi<|im_end|>\n",
    "x" * 200 + "0" * 50,
    "",
]


@pytest.fixture(scope="module")
def tokenizer(smollm2: LoadedModel) -> Tokenizer:
    assert smollm2.tokenizer is not None
    return smollm2.tokenizer


@pytest.fixture(scope="module")
def published(smollm2_path: Path) -> transformers.PreTrainedTokenizerBase:
    """Transformers' own reading of the file, with the word splitter of SmolLM2's tokenizer.json.

    Transformers puts GPT-2's in its place, which joins other digits than 0 to 9 with the space before them.
    """
    published = transformers.AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)
    published.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return published


@pytest.mark.parametrize("text", TEXTS)
def test_ids_equal_the_published_tokenizer_s(
    tokenizer: Tokenizer, published: transformers.PreTrainedTokenizerBase, text: str
) -> None:
    assert tokenizer.encode(text) == published.encode(text)


@pytest.mark.parametrize("text", TEXTS)
def test_real_vocabulary_round_trips_whole_and_streamed(tokenizer: Tokenizer, text: str) -> None:
    token_ids = tokenizer.encode(text)
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == text
    stream = tokenizer.stream()
    shown = [*(stream.put(token_id) for token_id in token_ids), stream.flush()]
    assert "".join(shown) == tokenizer.decode(token_ids)
    assert not any("\ufffd" in piece for piece in shown)


def test_chat_prompt_equals_transformers(
    tokenizer: Tokenizer, published: transformers.PreTrainedTokenizerBase
) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 + 1 = ?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "Sure?"},
    ]
    for chat in (messages, messages[1:]):
        expected = published.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert tokenizer.apply_chat_template(chat) == expected
        assert tokenizer.encode_chat(chat) == published.encode(expected, add_special_tokens=False)
