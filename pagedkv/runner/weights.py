"""The tensors that make up a model: their names, their shapes, and a loader that checks both.

Names are those of Hugging Face checkpoints; every file format is translated to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from pagedkv.errors import ShapeError, UsageError
from pagedkv.runner.config import ModelConfig

Progress = Callable[[int, int], None]
"""Called with (tensors done, tensors in all)."""


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor that a model of this `config` has, no more and no less."""
    hidden, inner = config.hidden_size, config.intermediate_size
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    linears = {
        "self_attn.q_proj": (heads, hidden),
        "self_attn.k_proj": (kv_heads, hidden),
        "self_attn.v_proj": (kv_heads, hidden),
        "self_attn.o_proj": (hidden, heads),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    norms = ["input_layernorm", "post_attention_layernorm"]
    if config.post_norms:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    if config.qk_norms:
        norms += ["self_attn.q_norm", "self_attn.k_norm"]
    biased: list[str] = []
    if config.attention_bias:
        biased += ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
    if config.output_bias:
        biased.append("self_attn.o_proj")
    if config.mlp_bias:
        biased += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for index in range(config.num_layers):
        layer = f"model.layers.{index}."
        for norm in norms:
            shapes[f"{layer}{norm}.weight"] = (config.head_dim if norm.startswith("self_attn") else hidden,)
        for linear, shape in linears.items():
            shapes[f"{layer}{linear}.weight"] = shape
            if linear in biased:
                shapes[f"{layer}{linear}.bias"] = shape[:1]
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def is_norm(name: str) -> bool:
    """Say whether a tensor holds the weights of a norm."""
    return name.endswith("norm.weight")


def collect_tensors(
    tensors: Iterable[tuple[str, Tensor]],
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    where: str,
    progress: Progress | None = None,
    cut: Callable[[str, Tensor], Tensor] | None = None,
) -> dict[str, Tensor]:
    """Convert `tensors` one by one to `dtype` and hold them to the shapes of `config`.

    With `cut`, only what it returns of each is kept. The weights of norms become float32 whatever the
    `dtype`: they are few, and multiply float32 numbers.

    Raises
    ------
    UsageError
        A tensor is missing, or is one that such a model doesn't have: ignoring it would be silently wrong.
    ShapeError
        A tensor has another shape or holds no plain floating-point numbers.
    """
    shapes = tensor_shapes(config)
    collected: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue  # older checkpoints carry what follows from config.json
        expected = shapes.get(name)
        if expected is None:
            raise UsageError(f"tensors: expected only those of {config.name}, got {name!r}, in {where}")
        if tuple(tensor.shape) != expected:
            raise ShapeError(
                f"{name}: expected shape {expected}, got {tuple(tensor.shape)}, in {where}",
                name, expected, tuple(tensor.shape),
            )  # fmt: skip
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise ShapeError(
                f"{name}: expected float32, float16 or bfloat16, got {tensor.dtype}, in {where}",
                name, "floating point", tensor.dtype,
            )  # fmt: skip
        if cut is not None:
            tensor = cut(name, tensor)
        collected[name] = tensor.to(device=device, dtype=torch.float32 if is_norm(name) else dtype)
        if progress is not None:
            progress(len(collected), len(shapes))
    missing = [name for name in shapes if name not in collected]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UsageError(f"tensors: expected {missing[0]!r}{more}, got nothing by that name, in {where}")
    return collected
