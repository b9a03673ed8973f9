"""A tokenizer out of a GGUF file's own vocabulary.

GGUF stores tokens, merges and the *name* of the rule by which text is split into words before merging.
A wrong rule gives a model that reads nonsense, so an unknown name is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from pagedkv.errors import UsageError
from pagedkv.runner.gguf_sentencepiece import has_space_prefix, sentencepiece_backend
from pagedkv.runner.tokenizer import Tokenizer

_CONTROL, _USER_DEFINED = 3, 4  # of the token types; the others are plain vocabulary

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (  # of Mistral's later models
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def _split(*patterns: str) -> list[pre_tokenizers.PreTokenizer]:
    return [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _bytes_only() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def _pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer | None:
    """Return the word splitter that llama.cpp means by `name`."""
    if name in ("smollm", "starcoder", "refact", "command-r", "codeshell"):
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])
    if name in ("gpt-2", "gpt2", "phi-2", "mpt", "olmo", "roberta-bpe"):
        return _gpt2()
    if name in (*_LLAMA3_NAMES, "smaug-bpe", "dbrx"):
        return pre_tokenizers.Sequence([*_split(_LLAMA3), _bytes_only()])
    if name in ("qwen2", "stablelm2", "megrez"):
        return pre_tokenizers.Sequence([*_split(_QWEN2), _bytes_only()])
    if name == "tekken":
        return pre_tokenizers.Sequence([*_split(_TEKKEN), _bytes_only()])
    if name == "default":
        words = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
        splits = _split(r"[\p{P}\$\+<=>\^~\|]+", words, r"\p{N}+", r"[0-9][0-9][0-9]")
        return pre_tokenizers.Sequence([*splits, _bytes_only()])
    return None


def tokenizer_from_gguf(metadata: Mapping[str, Any], *, where: str) -> Tokenizer:
    """Build the tokenizer that `metadata` describes.

    Raises
    ------
    UsageError
        The vocabulary is neither byte-level BPE nor SentencePiece's BPE, its pre-tokenizer is unknown, or its
        parts contradict each other.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        backend = _byte_level_backend(metadata, where)
        adds_bos = metadata.get("tokenizer.ggml.pre") in _LLAMA3_NAMES
        is_normalized = False
    elif model == "llama":
        backend = sentencepiece_backend(metadata, where=where)
        adds_bos = True
        # SentencePiece looks for tokens of its users in the text whose spaces it has replaced. Where a text
        # gets a space in front, so would they; then they are looked for as they stand.
        is_normalized = not has_space_prefix(metadata)
    else:
        expected = "'gpt2' (byte-level BPE) or 'llama' (SentencePiece's BPE)"
        raise UsageError(f"tokenizer.ggml.model: expected {expected}, got {model!r}, in {where}")

    tokens: list[str] = metadata.get("tokenizer.ggml.tokens", [])
    types = metadata.get("tokenizer.ggml.token_type", [])
    backend.add_tokens(
        [
            AddedToken(token, special=kind == _CONTROL, normalized=kind == _USER_DEFINED and is_normalized)
            for token, kind in zip(tokens, types, strict=False)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )

    def special(kind: str) -> str:
        index = metadata.get(f"tokenizer.ggml.{kind}_token_id")
        return tokens[index] if isinstance(index, int) and index < len(tokens) else ""

    bos, eos = special("bos"), special("eos")
    before = bos if metadata.get("tokenizer.ggml.add_bos_token", adds_bos) else ""
    after = eos if metadata.get("tokenizer.ggml.add_eos_token", False) else ""
    around = [token for token in (before, "$A", after) if token]
    if len(around) > 1:
        ids = [(token, tokens.index(token)) for token in around if token != "$A"]
        backend.post_processor = processors.TemplateProcessing(single=around, special_tokens=ids)
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(backend, bos_token=bos, eos_token=eos, chat_template=template)


def _byte_level_backend(metadata: Mapping[str, Any], where: str) -> Backend:
    name = metadata.get("tokenizer.ggml.pre", "default")
    pre_tokenizer = _pre_tokenizer(name)
    if pre_tokenizer is None:
        known = "'smollm', 'gpt-2', 'llama-bpe', 'qwen2', 'tekken' or a relative of theirs"
        raise UsageError(f"tokenizer.ggml.pre: expected {known}, got {name!r}, in {where}")
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens", [])
    vocab = {token: index for index, token in enumerate(tokens)}
    takes_words_whole = name in (*_LLAMA3_NAMES, "tekken")
    backend = Backend(
        models.BPE(vocab=vocab, merges=_merges(metadata, vocab, where), ignore_merges=takes_words_whole)
    )
    backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    return backend


def _merges(metadata: Mapping[str, Any], vocab: Mapping[str, int], where: str) -> list[tuple[str, str]]:
    merges = []
    for rank, merge in enumerate(metadata.get("tokenizer.ggml.merges", [])):
        left, _, right = merge.partition(" ")
        if left not in vocab or right not in vocab or left + right not in vocab:
            expected = "two tokens that join to a third"
            raise UsageError(f"tokenizer.ggml.merges[{rank}]: expected {expected}, got {merge!r}, in {where}")
        merges.append((left, right))
    return merges
