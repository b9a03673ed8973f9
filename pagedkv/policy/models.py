"""Models as a planner needs them: the KV of a token by groups of layers, and what computing it costs.

From a ``config.json`` as Hugging Face has it, or by name from a small table of such configurations.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pagedkv.checks import check_int, show
from pagedkv.errors import UsageError
from pagedkv.policy.layer_kinds import layer_windows
from pagedkv.policy.model_table import MODEL_TABLE
from pagedkv.spec import DTYPE_BYTES, SCALE_BYTES

MAX_SIZE = 2**31 - 1
_NESTED = ("text_config", "llm_config", "language_config", "thinker_config")
# Families whose feed-forward layers have no gate.
_TWO_MATRICES = {
    "apertus", "arcee", "bloom", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "mpt", "nemotron",
    "opt", "phi", "starcoder2",
}  # fmt: skip
_SAME = {
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim", "d_ff", "ffn_hidden_size"),
}


class LayerGroup(NamedTuple):
    """Layers that keep the same kind of KV.

    Attributes
    ----------
    num_layers : int
    window : int or None
        Tokens that these layers look back; None for all.
    num_kv_heads, head_dim : int
        Of each layer; for latent attention 1 and the width of the latent.
    values_per_token : int
        K and V of one token in one layer, in numbers; a latent is kept once.
    """

    num_layers: int
    window: int | None
    num_kv_heads: int
    head_dim: int
    values_per_token: int

    def bytes_per_token(self, dtype: str, *, scales: bool = False) -> int:
        """Bytes of one token in all layers of the group; `scales` adds one to each head of K and of V."""
        values = self.values_per_token * DTYPE_BYTES[dtype]
        of_scales = self.values_per_token // self.head_dim * SCALE_BYTES if scales else 0
        return self.num_layers * (values + of_scales)


@dataclass(frozen=True)
class Model:
    """What a model keeps of a token and spends on it.

    Attributes
    ----------
    name : str
    groups : tuple of LayerGroup
        Full attention first, then by window.
    dtype : str
        Of its weights and, unless told else, of its KV.
    flops_per_token : int
        Of all its matrices: two for each weight that a token meets, the output layer left out.
    flops_per_pair : int
        Of attention, in one layer, for a token and one that it sees.
    """

    name: str
    groups: tuple[LayerGroup, ...]
    dtype: str
    flops_per_token: int
    flops_per_pair: int

    def bytes_per_token(self, dtype: str | None = None, *, scales: bool = False) -> int:
        """Bytes of one token in all layers that keep it."""
        return sum(group.bytes_per_token(dtype or self.dtype, scales=scales) for group in self.groups)

    def prefill_flops(self, begin: int, end: int) -> int:
        """Operations to compute the tokens [begin, end) of a prompt when those before are cached."""
        pairs = sum(group.num_layers * _pairs(begin, end, group.window) for group in self.groups)
        return (end - begin) * self.flops_per_token + pairs * self.flops_per_pair


def _pairs(begin: int, end: int, window: int | None) -> int:
    """Pairs of a token in [begin, end) and one that it sees: itself, and those before it in the window."""

    def up_to(length: int) -> int:
        full = length if window is None else min(length, window)
        return full * (full + 1) // 2 + (length - full) * (window or 0)

    return up_to(end) - up_to(begin)


def find_model(name: str) -> Model:
    """Return the model of a ``config.json``, of a folder with one, or of a name in the table.

    Raises
    ------
    UsageError
        There is no such file or name, or the file lacks what the KV depends on.
    """
    path = Path(name)
    if name and path.is_dir():
        path = path / "config.json"
    if path.is_file():
        try:
            config = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise UsageError(f"{path}: expected a config.json, got {error}") from error
        return model_from_config(config, name=str(name))
    wanted = name.lower().rpartition("/")[2]
    for known, config in MODEL_TABLE.items():
        if known == wanted:
            return model_from_config(config, name=known)
    raise UsageError(f"model: expected a config.json or one of {', '.join(MODEL_TABLE)}, got {show(name)}")


def model_from_config(config: Any, *, name: str = "config.json") -> Model:
    """Return the model that a configuration describes.

    Raises
    ------
    UsageError
        Naming the field that is missing or wrong.
    """
    if not isinstance(config, dict):
        raise UsageError(f"{name}: expected a JSON object, got {show(config)}")
    fields = next((config[key] for key in _NESTED if isinstance(config.get(key), dict)), config)
    read = _Fields(name, {**config, **fields} if fields is not config else config)
    only_kv = read.get("num_key_value_heads")
    heads = read.size("num_attention_heads", only_kv if isinstance(only_kv, int) else None)
    hidden = read.size("hidden_size", heads * read.size("head_dim", 0) or None)
    pattern = read.get("hybrid_override_pattern", read.get("layers_block_type"))
    num_layers = read.size("num_hidden_layers", len(pattern) if isinstance(pattern, str | list) else None)
    windows = layer_windows(read.fields, num_layers, name)
    if read.get("kv_lora_rank") is not None:
        return _latent(read, hidden, heads, windows)
    head_dim = read.size("head_dim", hidden // heads or 1)
    # Where a query sees a window only, some models have other heads.
    kv_heads = _kv_heads(read, heads, len(windows))
    groups = [
        ((window, kv), LayerGroup(1, window, kv, head_dim, 2 * kv * head_dim))
        for window, kv in zip(windows, kv_heads, strict=True)
        if window != 0 and kv
    ]
    weights = sum(
        hidden * head_dim * 2 * (heads + kv) if window != 0 else 4 * hidden * hidden
        for window, kv in zip(windows, kv_heads, strict=True)
    )
    flops = 2 * (weights + _feed_forward(read, hidden, len(windows)))
    return Model(name, _merge(group for _, group in groups), read.dtype(), flops, 4 * heads * head_dim)


def _latent(read: _Fields, hidden: int, heads: int, windows: list[int | None]) -> Model:
    """Return a model whose layers keep one latent a token, and a key's rotated part beside it (MLA)."""
    rank, rope = read.size("kv_lora_rank"), read.size("qk_rope_head_dim", 0)
    nope, value = read.size("qk_nope_head_dim"), read.size("v_head_dim")
    query_rank = read.size("q_lora_rank", 0)
    queries = heads * (nope + rope)
    of_query = query_rank * (hidden + queries) if query_rank else hidden * queries
    of_latent = hidden * (rank + rope) + rank * heads * (nope + value)
    weights = len(windows) * (of_query + of_latent + heads * value * hidden)
    groups = [LayerGroup(1, window, 1, rank + rope, rank + rope) for window in windows if window != 0]
    flops = 2 * (weights + _feed_forward(read, hidden, len(windows)))
    return Model(read.name, _merge(groups), read.dtype(), flops, 2 * heads * (nope + rope + value))


def _kv_heads(read: _Fields, heads: int, num_layers: int) -> list[int]:
    if read.get("multi_query") is True and not read.get("new_decoder_architecture"):
        return [1] * num_layers  # Falcon and StarCoder, whatever else they say
    listed = read.get("num_key_value_heads", read.get("num_kv_heads", read.get("n_head_kv")))
    if isinstance(listed, list):
        if len(listed) != num_layers:
            raise UsageError(f"{read.name}: expected KV heads of {num_layers} layers, got {len(listed)}")
        return [check_int(f"{read.name}: num_key_value_heads", kv, 0, 2**16) for kv in listed]
    if listed is None:
        listed = heads
    return [check_int(f"{read.name}: num_key_value_heads", listed, 1, 2**16)] * num_layers


def _feed_forward(read: _Fields, hidden: int, num_layers: int) -> int:
    """Return the weights of all feed-forward layers that one token meets: its experts', and shared ones."""
    listed = read.get("intermediate_size")
    if isinstance(listed, list) and listed:  # Gemma 3n: one for each layer
        sizes = [check_int(f"{read.name}: intermediate_size", size, 0, MAX_SIZE) for size in listed]
        return 3 * hidden * sum(sizes)
    inner = read.size("intermediate_size", 4 * hidden)
    experts = next((read.get(n) for n in ("num_experts_per_tok", "num_experts_per_token", "moe_top_k")
                    if read.get(n) is not None), None)  # fmt: skip
    if not experts:
        gated = read.get("model_type") not in _TWO_MATRICES
        return num_layers * (3 if gated else 2) * hidden * inner
    of_expert = read.size("moe_intermediate_size", inner)
    shared = read.size("n_shared_experts", 0) * of_expert + read.size("shared_expert_intermediate_size", 0)
    dense = min(num_layers, read.size("first_k_dense_replace", 0))
    active = check_int(f"{read.name}: num_experts_per_tok", experts, 1, 2**16) * of_expert + shared
    return 3 * hidden * (dense * inner + (num_layers - dense) * active)


def _merge(groups: Iterable[LayerGroup]) -> tuple[LayerGroup, ...]:
    counts: dict[LayerGroup, int] = {}
    for group in groups:
        counts[group] = counts.get(group, 0) + 1
    merged = (group._replace(num_layers=count) for group, count in counts.items())
    return tuple(sorted(merged, key=lambda group: (group.window is not None, group.window or 0)))


class _Fields:
    """The fields of a configuration, some of which have several names."""

    def __init__(self, name: str, fields: dict[str, Any]) -> None:
        self.name, self.fields = name, fields

    def get(self, name: str, default: Any = None) -> Any:
        value = self.fields.get(name)
        return default if value is None else value

    def size(self, name: str, default: int | None = None) -> int:
        found = next(
            (self.fields[n] for n in _SAME.get(name, (name,)) if self.fields.get(n) is not None), None
        )
        if found is None:
            if default is None:
                raise UsageError(f"{self.name}: expected the field {name}, got none")
            return default
        return check_int(f"{self.name}: {name}", found, 0 if default == 0 else 1, MAX_SIZE)

    def dtype(self) -> str:
        named = self.get("torch_dtype", self.get("dtype", "bfloat16"))
        return named if isinstance(named, str) and named in DTYPE_BYTES else "bfloat16"
