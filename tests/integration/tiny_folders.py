"""A tiny model with random weights, laid out as users have theirs: a folder with a tokenizer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import tokenizers
from safetensors.torch import save_file
from tiny_models import TINY, random_tensors

CHAT_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def write_tiny_folder(folder: Path, *, context_length: int = 512, chat: bool = True, text: str = "") -> Path:
    """Write config, weights and a tokenizer of 512 tokens, trained on `text`; return the folder."""
    folder.mkdir(exist_ok=True)
    config = replace(TINY, vocab_size=512, context_length=context_length)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|start|>", "<|end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    if chat:
        settings = {"chat_template": CHAT_TEMPLATE, "eos_token": "<|end|>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    save_file(random_tensors(config), folder / "model.safetensors")
    values = {
        "architectures": ["LlamaForCausalLM"],
        "_name_or_path": "tiny",
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
        "tie_word_embeddings": True,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return folder
