"""GGUF files of transformers' models, written by the rules of llama.cpp's converter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

OUTER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
LAYER_NAMES_OF_GEMMA_2_AND_3 = {
    **LAYER_NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma": gguf.MODEL_ARCH.GEMMA,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
}


def gguf_name(name: str, *, post_norms: bool = False) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, index, part = stem.split(".", 3)
        names = LAYER_NAMES_OF_GEMMA_2_AND_3 if post_norms else LAYER_NAMES
        return f"blk.{index}.{names[part]}.{kind}"
    return f"{OUTER_NAMES[stem]}.{kind}"


def permuted(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's order of a Llama's q and k rows."""
    by_half = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return by_half.swapaxes(1, 2).reshape(rows.shape)


def write_reference_gguf(path: Path, reference: Any) -> None:
    """Write a model of transformers, with float32 weights."""
    config = reference.config
    arch = ARCHITECTURES[config.model_type]
    name = gguf.MODEL_ARCH_NAMES[arch]
    is_gemma = name.startswith("gemma")
    writer = gguf.GGUFWriter(path, name)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if name == "llama":
        writer.add_vocab_size(config.vocab_size)
        writer.add_rope_dimension_count(head_dim)
    _add_positions(writer, config, head_dim)
    _add_windows(writer, config)
    if name == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if is_gemma and getattr(config, "final_logit_softcapping", None):
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if getattr(config, "query_pre_attn_scalar", head_dim) != head_dim:
        writer.add_attention_scale(config.query_pre_attn_scalar**-0.5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([f"token {index}" for index in range(config.vocab_size)])
    writer.add_token_types([gguf.TokenType.NORMAL] * config.vocab_size)
    writer.add_token_merges([])
    writer.add_eos_token_id(7)
    known = set(gguf.MODEL_TENSORS[arch])
    by_name = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for key, tensor in reference.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        rows = tensor.float().numpy()
        if is_gemma and key.endswith("norm.weight"):
            rows = rows + 1
        if name == "llama" and ("q_proj" in key or "k_proj" in key):
            is_query = "q_proj" in key
            rows = permuted(rows, config.num_attention_heads if is_query else config.num_key_value_heads)
        translated = gguf_name(key, post_norms=name in ("gemma2", "gemma3"))
        # The gguf package knows the names too.
        kind, official = by_name.get_type_and_name(key, try_suffixes=(".weight", ".bias")) or (None, None)
        assert kind in known, key
        assert translated == official
        writer.add_tensor(translated, rows)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_positions(writer: gguf.GGUFWriter, config: Any, head_dim: int) -> None:
    rope = config.rope_parameters
    if "full_attention" in rope:
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    elif rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    elif rope["rope_type"] == "llama3":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        plain = rope["rope_theta"] ** -(torch.arange(0, head_dim, 2) / head_dim)
        writer.add_tensor("rope_freqs.weight", (plain / scaled).numpy().astype(np.float32))


def _add_windows(writer: gguf.GGUFWriter, config: Any) -> None:
    window = getattr(config, "sliding_window", None)
    if window is None:
        return
    writer.add_sliding_window(window)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in kinds])
