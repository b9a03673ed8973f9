"""Sees the whole prompt of a call of `generate`, which hands the model only what is not cached of it."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch

from pagedkv.contrib.hf.hooks import before_forward, check_no_cache, find_session


def watch_prompts(model: Any) -> None:
    """Have `model.generate` compare its prompt with the session's; calls without a session are as before."""
    has_own = "generate" in vars(model)  # another cache's, or somebody's
    if hasattr(type(model), "generate") and not has_own:
        model.generate = MethodType(generate, model)


def unwatch_prompts(model: Any) -> None:
    """Take that back, unless another cache's hooks are on the model."""
    hooks = model._forward_pre_hooks.values()
    if not any(getattr(hook, "func", None) is before_forward for hook in hooks):
        own = vars(model).get("generate")
        if getattr(own, "__func__", None) is generate:
            del model.generate


def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Generate, unless the prompt is another than the session's. A pickled model has its own by this name.

    Raises
    ------
    UsageError
    """
    check_no_cache(kwargs)
    session = find_session(kwargs)
    ids = args[0] if args else kwargs.get("inputs", kwargs.get("input_ids"))
    if session is not None and isinstance(ids, torch.Tensor) and ids.ndim == 2:
        mask = kwargs.get("attention_mask")
        if mask is None or mask.shape == ids.shape:  # else the ids are those of new columns alone
            session.check_prompt(ids)
    return type(model).generate(model, *args, **kwargs)
