"""Makes ``attn_implementation="pagedkv"`` known to transformers, and to models that don't ask it."""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any, NoReturn

from transformers import modeling_utils

from pagedkv.contrib.hf.releases import ASKS_FOR_MASKS, MASKS_SINCE
from pagedkv.contrib.hf.versions import installed
from pagedkv.errors import UsageError

NAME = "pagedkv"
INSTEAD = "leave it at its default, and K and V are gathered from the pages"

OWN_TABLES = {
    "diffllama": "DIFFLLAMA_ATTENTION_CLASSES",
    "falcon": "FALCON_ATTENTION_CLASSES",
    "gpt_neo": "GPT_NEO_ATTENTION_CLASSES",
    "gptj": "GPTJ_ATTENTION_CLASSES",
    "jetmoe": "JETMOE_ATTENTION_CLASSES",
    "nemotron": "NEMOTRON_ATTENTION_CLASSES",
    "olmoe": "OLMOE_ATTENTION_CLASSES",
    "phimoe": "PHIMOE_ATTENTION_CLASSES",
    "qwen2_moe": "QWEN2MOE_ATTENTION_CLASSES",
    "stablelm": "ATTENTION_CLASSES",
}
"""Decoders that choose their attention from a table of their own, in some releases or in all."""


def register_attention() -> None:
    """Register the name, once for all models; where it can't work, with a refusal behind it."""
    if ASKS_FOR_MASKS:
        from transformers import AttentionInterface, AttentionMaskInterface

        from pagedkv.contrib.hf.attention import paged_attention_forward
        from pagedkv.contrib.hf.masks import paged_mask

        AttentionInterface.register(NAME, paged_attention_forward)
        AttentionMaskInterface.register(NAME, paged_mask)
    else:
        functions = getattr(modeling_utils, "ALL_ATTENTION_FUNCTIONS", {})
        getattr(functions, "_global_mapping", functions)[NAME] = refuse_release
    for model, name in OWN_TABLES.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what older releases do as they are imported
            try:
                module = import_module(f"transformers.models.{model}.modeling_{model}")
            except ImportError:
                continue
        table = getattr(module, name, None)
        if table is not None:
            table[NAME] = refuse_layer


def refuse_release(*args: Any, **kwargs: Any) -> NoReturn:
    """Say which release attention in place takes.

    Raises
    ------
    UsageError
    """
    raise UsageError(
        f"attn_implementation: expected transformers >= {MASKS_SINCE} for 'pagedkv', got {installed()}; "
        f"{INSTEAD}"
    )


def refuse_layer(config: Any, *args: Any, **kwargs: Any) -> NoReturn:
    """Say that a model's layers don't ask transformers for attention.

    Raises
    ------
    UsageError
    """
    raise not_looked_up(str(config.model_type))


def not_looked_up(name: str) -> UsageError:
    """Return the refusal of a model whose layers don't look up their attention."""
    return UsageError(
        f"attn_implementation: expected one that {name} has, got 'pagedkv', which its layers don't look up "
        f"in AttentionInterface; {INSTEAD}"
    )
