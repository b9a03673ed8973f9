"""The operations on pages, one module a backend, and the choice between them.

:mod:`pagedkv.ops` checks shapes, dtypes and devices; a backend is given every argument by position, writes
into the tensors that it is given, and returns nothing::

    write_kv(key, value, key_pages, value_pages, slot_mapping, key_scales, value_scales)
    paged_attention(query, key_pages, value_pages, block_table, seq_lens, query_start_loc, out, lse,
                    scale, causal, window, soft_cap, alibi_slopes, sinks, mask, key_scales, value_scales,
                    prefix_groups, prefix_rows)
    copy_blocks(blocks, sources, destinations)
    gather_blocks(blocks, block_ids, buffer)
    scatter_blocks(buffer, block_ids, blocks)
    merge_attention_states(outs, lses, out, lse)

What they mean stands in :mod:`pagedkv.ops`. The last dimension of keys, values, queries, pages and outputs
has stride 1; all others have any strides. An option that is off is None, for `window` and `soft_cap` 0.
Scales are ``[num_blocks, block_size, num_kv_heads]``, with strides of 0 where one scale stands for many: then
`write_kv` only reads them, else it computes them.

A backend that needs more than the package has a function ``why_unavailable() → str | None`` beside them,
which says what is missing. Importing it needs nothing but the modules that its extra installs.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, get_args

import torch

from pagedkv import _core
from pagedkv.checks import show
from pagedkv.config import BACKEND, Backend, read_backend
from pagedkv.errors import BackendUnavailableError

BACKENDS: tuple[Backend, ...] = get_args(Backend)

_BEST: dict[str, tuple[Backend, ...]] = {"cpu": ("cpu",), "cuda": ("cuda", "triton")}
"""By device, the best first; other devices have torch alone."""
_ONLY_ON: dict[str, str] = {"cpu": "cpu", "cuda": "cuda"}
"""Backends that take the tensors of one kind of device."""


def resolve_backend(name: Backend | None, device: torch.device) -> Backend:
    """Return the backend that `name` asks for, or else PAGEDKV_BACKEND, or the best one for the device.

    Raises
    ------
    BackendUnavailableError
        When it can't be had here, or not for tensors of this device.
    UsageError
        When PAGEDKV_BACKEND holds no backend's name.
    """
    name = read_backend() if name is None else check_backend(name)
    if name is None:
        return _best_backend(device.type)
    _load_for(name, device.type)
    return name


def choose_backend(name: str, tensor: torch.Tensor) -> ModuleType:
    """Return the backend of that name; "" stands for what :func:`resolve_backend` makes of None. Quick."""
    device_type = "cpu" if tensor.is_cpu else tensor.device.type
    return _load_for(name, device_type) if name else _load_asked(_core.environment(BACKEND.name), device_type)


@cache
def _load_asked(value: str, device_type: str) -> ModuleType:
    """Load what PAGEDKV_BACKEND asks for when it holds `value`."""
    name = read_backend({BACKEND.name: value})
    return load_backend(_best_backend(device_type)) if name is None else _load_for(name, device_type)


@cache
def _load_for(name: str, device_type: str) -> ModuleType:
    backend = check_backend(name)
    if _ONLY_ON.get(backend, device_type) != device_type:
        raise BackendUnavailableError(f"backend: expected one for tensors on {device_type}, got {name!r}")
    return load_backend(backend)


def check_backend(name: Any) -> Backend:
    """Return `name`, which is a backend's.

    Raises
    ------
    BackendUnavailableError
    """
    if not isinstance(name, str) or name not in BACKENDS:
        raise BackendUnavailableError(f"backend: expected one of {', '.join(BACKENDS)}, got {show(name)}")
    return name


@cache
def load_backend(name: Backend) -> ModuleType:
    """Import a backend that can work here.

    Raises
    ------
    BackendUnavailableError
        Says what is missing.
    """
    try:
        module = import_module(f"pagedkv.kernels.{name}")
    except ModuleNotFoundError as error:
        raise BackendUnavailableError(_missing(name, error.name or "")) from error
    why_unavailable = getattr(module, "why_unavailable", None)
    reason = why_unavailable() if why_unavailable is not None else None
    if reason is not None:
        raise BackendUnavailableError(f"backend: expected one that works here, got {name!r}: {reason}")
    return module


def why_unavailable(name: Backend) -> str | None:
    """Say why a backend can't work here; None when it can."""
    try:
        load_backend(name)
    except BackendUnavailableError as error:
        return str(error)
    return None


@cache
def _best_backend(device_type: str) -> Backend:
    reasons = []
    for name in _BEST.get(device_type, ("reference",)):
        try:
            load_backend(name)
        except BackendUnavailableError as error:
            reasons.append(str(error))
        else:
            return name
    raise BackendUnavailableError(f"backend: expected one for {device_type}, got none: {'; '.join(reasons)}")


def _missing(name: Backend, module: str) -> str:
    if module.startswith("pagedkv."):
        return f"backend: expected one that this build has, got {name!r}: there is no {module}"
    return f"backend: expected {module} for {name!r}, got no such module; pip install 'pagedkv[{name}]'"
