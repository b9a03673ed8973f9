"""What runs around a model's forward: it tells a session which tokens come, and that they are computed."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch

from pagedkv.contrib.hf.eagerly import uncompiled
from pagedkv.contrib.hf.probing import CACHE_NAMES
from pagedkv.contrib.hf.session import PagedSession, running_session
from pagedkv.errors import CapacityError, StateError, UsageError

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

MEDIA = (
    "pixel_values",
    "pixel_values_videos",
    "image_embeds",
    "input_features",
    "input_values",
    "audio_values",
    "mm_encoder_outputs",
)
"""Inputs that stand behind placeholder tokens, so that equal tokens may have different K and V."""
BY_COLUMN = ("input_ids", "position_ids", "token_type_ids", "mm_token_type_ids", "cache_position")
"""Inputs with an entry for each new column in their last dimension."""


@uncompiled
def before_forward(
    hooks_of: object, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Arguments | None:
    """Begin a pass if the model was given a session. A forward pre-hook, with keyword arguments.

    `hooks_of` is the `hook_key` of the cache whose hook this is: a model may have several caches.
    """
    interrupted = running_session.get()
    if interrupted is not None and interrupted.owner.hook_key is hooks_of and interrupted.runs_in(model):
        interrupted.abandon()  # by the keyboard, say: torch calls no hook then
    session = find_session(kwargs)
    if session is None:
        check_no_cache(kwargs)
        return None
    if not any(model is module for module in session.owner.modules):
        name = type(model).__name__
        raise UsageError(f"cache: expected a session of this {name}'s own cache, got one of another model's")
    if session.is_running:
        if running_session.get() is not session:
            raise StateError("session: expected one call at a time, got another thread's beside it")
        return None  # the model inside of the one that began
    if session.owner.hook_key is not hooks_of:
        return None
    if args:  # nearly everybody calls by keyword
        if len(args) > 1 or "input_ids" in kwargs:
            raise UsageError("forward: expected keyword arguments behind input_ids, got positional ones")
        kwargs = {**kwargs, "input_ids": args[0]}
    if kwargs.get("use_cache") is False:  # generate would give every pass the whole text, as if it were new
        raise UsageError(f"use_cache: expected True with a session, got False, {_where_from(model)}")
    ids = kwargs.get("input_ids")
    if ids is None or kwargs.get("inputs_embeds") is not None:
        raise UsageError("forward: expected input_ids, got embeddings, whose K and V no token can find")
    if kwargs.get("labels") is not None:
        raise UsageError("labels: expected none with a session, got some: no logits come of what is cached")
    _check_media(session, kwargs)
    places = kwargs.get("cache_position")
    if places is not None and session.get_seq_length() > int(places[0]) == 0:
        session.rewind(ids.shape[1])
    surplus = session.num_surplus_columns(
        ids, kwargs.get("attention_mask"), kwargs.get("position_ids", places)
    )
    if surplus:
        length = ids.shape[1]
        kwargs = dict(kwargs)
        for name in BY_COLUMN:
            tensor = kwargs.get(name)
            if tensor is not None and tensor.shape[-1] == length:
                kwargs[name] = tensor[..., surplus:]
    positions = uncounted_padding(session, model, kwargs)
    if positions is not None:
        kwargs = {**kwargs, "position_ids": positions}
    new = kwargs["input_ids"], kwargs.get("attention_mask"), kwargs.get("position_ids")
    while (lost_to := session.begin(model, *new)) is not None:
        compute_lost(session, model, kwargs, lost_to)
    return (), kwargs


@uncompiled
def after_forward(model: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    """End the pass. A forward hook that is always called; the output is None where the model raised."""
    session = find_session(kwargs)
    if session is not None and session is running_session.get() and session.runs_in(model):
        if output is None:
            session.abandon()
        else:
            session.end()


def compute_lost(session: PagedSession, model: torch.nn.Module, kwargs: dict[str, Any], end: int) -> None:
    """Run the columns up to `end` in a pass of their own: they were found cached, and are not any more."""
    if session.has_extras:  # whose columns have more than a token each
        raise CapacityError(
            "session: expected a page for what is cached inside of a block, got none in a full pool; make "
            "a pool of more blocks"
        )
    device = kwargs["input_ids"].device
    ids, mask = (tensor.to(device) for tensor in session.known(end))
    new: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "use_cache": True}
    new |= {name: value for name, value in kwargs.items() if value is session}
    if "position_ids" in signature(model.forward).parameters:
        new["position_ids"] = mask.cumsum(1).sub(1).clamp(min=0)[:, session.get_seq_length() :]
    model(**new)


def uncounted_padding(
    session: PagedSession, model: torch.nn.Module, kwargs: dict[str, Any]
) -> torch.Tensor | None:
    """Return positions [batch, length] without padding, where the model was given none or those of columns.

    A caller may leave them out, and some releases count columns when they cut a prompt into chunks: with
    padding, a token would stand at a place where no other batch could use its K.
    """
    mask, given = kwargs.get("attention_mask"), kwargs.get("position_ids")
    if mask is None or mask.ndim != 2 or session.has_extras or bool(mask.all()):
        return None
    if "position_ids" not in signature(model.forward).parameters:
        return None  # it takes them from the mask
    past, length = session.get_seq_length(), kwargs["input_ids"].shape[1]
    columns = torch.arange(past, past + length, device=mask.device)
    if given is not None and not (given.shape == (1, length) and bool((given == columns).all())):
        return None
    positions: torch.Tensor = (mask != 0).long().cumsum(1).sub(1).clamp(min=0)
    return positions[:, past : past + length]


def find_session(kwargs: dict[str, Any]) -> PagedSession | None:
    """Return the session among the arguments of a forward or of `generate`."""
    for name in CACHE_NAMES:
        if isinstance(kwargs.get(name), PagedSession):
            session: PagedSession = kwargs[name]
            return session
    return None


def check_no_cache(kwargs: dict[str, Any]) -> None:
    """Refuse a PagedCache in place of one of its sessions.

    Raises
    ------
    UsageError
    """
    for name in CACHE_NAMES:
        if hasattr(given := kwargs.get(name), "hook_key"):
            raise UsageError(
                f"{name}: expected a session, cache.session(input_ids), got the cache itself: {given!r}"
            )


def _where_from(model: torch.nn.Module) -> str:
    is_usual = getattr(model.config, "use_cache", True)
    return (
        "an argument"
        if is_usual
        else "which the model's configuration says unless generate is told otherwise"
    )


def _check_media(session: PagedSession, kwargs: dict[str, Any]) -> None:
    given = [name for name in MEDIA if kwargs.get(name) is not None]
    if given and not session.has_extras:
        raise UsageError(
            f"{given[0]}: expected a session(…, extras=[Media(…)]) that says what stands behind the "
            "placeholder tokens, got one without"
        )
