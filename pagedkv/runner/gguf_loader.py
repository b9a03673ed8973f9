"""Reading a model out of a GGUF file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from pagedkv.errors import UsageError
from pagedkv.runner.config import ModelConfig
from pagedkv.runner.gguf_config import read_gguf_config
from pagedkv.runner.gguf_tokenizer import tokenizer_from_gguf
from pagedkv.runner.tokenizer import Tokenizer

MAGIC = b"GGUF"

_OUTER_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAMES_WITH_POST_NORMS = {
    **_LAYER_NAMES,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_ROPE_FACTORS = "rope_freqs.weight"


class GGUFSource:
    """One opened file: its configuration at once, its tokenizer and tensors on demand.

    Raises
    ------
    UsageError
        The file is no GGUF file, is cut off or damaged, or holds a model of another architecture.
    """

    def __init__(self, path: Path) -> None:
        self.where = str(path)
        self._metadata, self._tensors = _read(path)
        factors = self._tensors.pop(_ROPE_FACTORS, None)
        self.config = read_gguf_config(
            self._metadata,
            frozenset(self._tensors),
            where=self.where,
            rope_freq_factors=None if factors is None else tuple(_dequantize(factors).tolist()),
        )

    def tokenizer(self) -> Tokenizer:
        """Build the tokenizer from the file's vocabulary."""
        return tokenizer_from_gguf(self._metadata, where=self.where)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, float32 tensor), one at a time."""
        is_llama = self._metadata["general.architecture"] == "llama"  # the only one that permutes
        for name, tensor in self._tensors.items():
            values = _dequantize(tensor)
            if is_llama and ".attn_q." in name:
                values = _unpermute(values, self.config.num_heads)
            elif is_llama and ".attn_k." in name:
                values = _unpermute(values, self.config.num_kv_heads)
            yield _hf_name(name, self.config), torch.from_numpy(values)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, gguf.ReaderTensor]]:
    """Return metadata and tensors (still quantised, mapped from disk)."""
    size = path.stat().st_size
    try:
        reader = gguf.GGUFReader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OverflowError, TypeError, MemoryError) as error:
        # What the reader raises depends on where the damage is.
        raise UsageError(f"model: expected a whole GGUF file, got damage ({error}), in {path}") from error
    for tensor in reader.tensors:
        end = tensor.data_offset + tensor.n_bytes
        if end > size:
            raise UsageError(
                f"model: expected at least {end} bytes, got a file of {size} bytes that ends inside "
                f"{tensor.name!r}, in {path}"
            )
    return metadata, {tensor.name: tensor for tensor in reader.tensors}


def _dequantize(tensor: gguf.ReaderTensor) -> np.ndarray[Any, np.dtype[np.float32]]:
    try:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        kind = tensor.tensor_type.name
        raise UsageError(f"{tensor.name}: expected a known quantisation, got {kind}") from error
    # A copy: what is mapped from the file is read-only, and would keep it open.
    return np.array(values, dtype=np.float32)


def _unpermute(
    values: np.ndarray[Any, np.dtype[np.float32]], num_heads: int
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Undo llama.cpp's order of a Llama's q and k rows.

    llama.cpp rotates neighbouring pairs (2i, 2i + 1) of it and stores each head's rows that way; Hugging Face
    checkpoints, this runner, and llama.cpp for other models rotate (i, i + head_dim / 2).
    """
    if values.shape[0] % (2 * num_heads):
        return values  # a wrong shape, which is reported by name later
    by_pair = values.reshape(num_heads, values.shape[0] // num_heads // 2, 2, *values.shape[1:])
    return np.ascontiguousarray(by_pair.swapaxes(1, 2).reshape(values.shape))


def _hf_name(name: str, config: ModelConfig) -> str:
    """Translate a tensor's name; an unknown one stays as it is and is refused later."""
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    layer_names = _LAYER_NAMES_WITH_POST_NORMS if config.post_norms else _LAYER_NAMES
    if layer and layer[2] in layer_names:
        return f"model.layers.{layer[1]}.{layer_names[layer[2]]}.{layer[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{_OUTER_NAMES[stem]}.{kind}" if stem in _OUTER_NAMES else name
