"""The bundled model as other engines want it: a Hugging Face folder in bfloat16.

python -m benchmarks.work.model_folder FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from pagedkv.runner.bundled import bundled_model_path
from pagedkv.runner.loader import open_source


def write_folder(folder: Path) -> Path:
    """Write config.json and the weights, unless they are there; return the folder."""
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    source = open_source(bundled_model_path())
    config = source.config
    tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in source.tensors()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    values = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": sorted(config.eos_token_ids)[0],
        "torch_dtype": "bfloat16",
    }
    # Last, so that a folder with it is complete.
    (folder / "config.json").write_text(json.dumps(values, indent=1), encoding="utf-8")
    return folder


if __name__ == "__main__":
    print(write_folder(Path(sys.argv[1])))
