"""Token ids as users have them, turned into one array."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv import _core
from pagedkv.checks import check_int, check_iterable
from pagedkv.errors import UsageError

MAX_TOKEN = 2**32 - 1


def as_tokens(token_ids: Any, name: str = "token_ids") -> npt.NDArray[np.integer[Any]]:
    """Token ids as a contiguous array of one dimension; a suitable array is returned as it is, not copied.

    Parameters
    ----------
    token_ids : array or iterable of int
        List, tuple, range, generator, numpy array, torch tensor on the CPU, …, of any integer type.
    name : str
        What messages call it.

    Returns
    -------
    ndarray [num_tokens], of some integer dtype in native byte order
        Its values may still lie outside 0 … 2³² − 1: the core checks them where it reads them, in one pass.

    Raises
    ------
    UsageError
        Naming the first element that is no token id, or the dtype or shape that does not fit.
    """
    if _core.is_plain_array(token_ids):  # nearly always
        return token_ids  # type: ignore[no-any-return]
    if isinstance(token_ids, np.ndarray):
        return _from_array(token_ids, name)
    if isinstance(token_ids, range):
        return _from_range(token_ids, name)
    if isinstance(token_ids, list | tuple):
        return _from_list(list(token_ids), name)
    if isinstance(token_ids, str | bytes | bytearray | Set | Mapping):
        raise UsageError(f"{name}: expected token ids in order, got {type(token_ids).__name__}")
    if hasattr(token_ids, "__array__"):
        try:
            array = np.asarray(token_ids)
        except (TypeError, ValueError, RuntimeError) as error:
            got = f"{type(token_ids).__name__} ({error})"
            raise UsageError(f"{name}: expected an array that numpy can read, got {got}") from error
        return _from_array(array, name)
    try:
        view = memoryview(token_ids)  # array.array and other buffers
    except TypeError:
        return _from_list(list(check_iterable(name, token_ids)), name)
    return _from_array(np.asarray(view), name)


def token_list(token_ids: Any, name: str = "token_ids") -> list[int]:
    """Token ids as a list, their values checked, for who reads them without the core."""
    tokens = as_tokens(token_ids, name)
    bad = np.flatnonzero((tokens < 0) | (tokens > MAX_TOKEN))
    if bad.size:
        _check_token(int(tokens[bad[0]]), int(bad[0]), name)
    return list(map(int, tokens.tolist()))


def _from_array(array: npt.NDArray[Any], name: str) -> npt.NDArray[np.integer[Any]]:
    if array.ndim != 1:
        raise UsageError(f"{name}: expected one dimension, got shape {array.shape}")
    if array.dtype == object:
        return _from_list(array.tolist(), name)
    if array.size == 0:
        return np.empty(0, np.uint32)
    if array.dtype.kind not in "iu":
        raise UsageError(f"{name}: expected an integer dtype, got {array.dtype}")
    if not array.flags.aligned:  # a view at an odd offset, which the core could not read everywhere
        array = array.copy()
    return np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))


def _from_list(token_ids: list[Any], name: str) -> npt.NDArray[np.uint32]:
    # Not np.asarray: it is seven times slower, makes float64 of mixed integer types and 1 of True.
    tokens = _core.leading_tokens(token_ids)
    if len(tokens) < len(token_ids):
        _check_token(token_ids[len(tokens)], len(tokens), name)
    return tokens


def _from_range(token_ids: range, name: str) -> npt.NDArray[np.int64]:
    if not token_ids:
        return np.empty(0, np.int64)
    _check_token(token_ids[0], 0, name)
    _check_token(token_ids[-1], len(token_ids) - 1, name)
    return np.arange(token_ids.start, token_ids.stop, token_ids.step, dtype=np.int64)


def _check_token(token: Any, i: int, name: str) -> None:
    check_int(name, token, 0, MAX_TOKEN, f", at index {i}")
