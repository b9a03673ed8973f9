"""SentencePiece's BPE out of a GGUF file: Gemma's, Mistral's and Llama 2's tokenizers.

Its vocabulary has scores and no list of merges: of all neighbours that join to a token, those with the best
score are joined first. The library `tokenizers` wants ranked pairs, so every way to cut a token in two is
listed, best scores first. What no token covers is spelled out in byte tokens, ``<0x00>`` to ``<0xFF>``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers

from pagedkv.errors import UsageError

_NORMAL, _UNKNOWN = 1, 2  # of the token types
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # how SentencePiece writes a space


def has_space_prefix(metadata: Mapping[str, Any]) -> bool:
    """Say whether a text is read as if a space stood in front of it."""
    return bool(metadata.get("tokenizer.ggml.add_space_prefix", True))


def sentencepiece_backend(metadata: Mapping[str, Any], *, where: str) -> Backend:
    """Build splitting, merging and decoding; special tokens are not known to it yet.

    Raises
    ------
    UsageError
        Tokens, scores and types are not as many, or tokens for single bytes are missing.
    """
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens", [])
    scores: list[float] = metadata.get("tokenizer.ggml.scores", [])
    types: list[int] = metadata.get("tokenizer.ggml.token_type", [])
    for name, values in (("scores", scores), ("token_type", types)):
        if len(values) != len(tokens):
            expected = f"{len(tokens)}, one a token"
            raise UsageError(f"tokenizer.ggml.{name}: expected {expected}, got {len(values)}, in {where}")
    vocab = {token: index for index, token in enumerate(tokens)}
    missing = next((f"<0x{byte:02X}>" for byte in range(256) if f"<0x{byte:02X}>" not in vocab), None)
    if missing is not None:
        expected = "a token for every byte"
        raise UsageError(f"tokenizer.ggml.tokens: expected {expected}, got none for {missing}, in {where}")
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    backend = Backend(
        models.BPE(
            vocab=vocab,
            merges=_merges(tokens, scores, types, vocab),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", _SPACE)
    decoding = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if has_space_prefix(metadata):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
        decoding.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = spaces
    backend.decoder = decoders.Sequence(decoding)
    return backend


def _merges(
    tokens: Sequence[str], scores: Sequence[float], types: Sequence[int], vocab: Mapping[str, int]
) -> list[tuple[str, str]]:
    joined = [index for index, kind in enumerate(types) if kind == _NORMAL and len(tokens[index]) > 1]
    joined.sort(key=lambda index: -scores[index])  # stable: equal scores go by id
    return [
        (left, right)
        for token in map(tokens.__getitem__, joined)
        for cut in range(1, len(token))
        if (left := token[:cut]) in vocab and (right := token[cut:]) in vocab
    ]
