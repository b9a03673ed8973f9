"""merge_attention_states: attention over parts of the keys becomes attention over all of them."""

from __future__ import annotations

import torch

import pagedkv.torch_library  # noqa: F401  (registers torch.ops.pagedkv)
from pagedkv.config import Backend
from pagedkv.kernels import check_backend
from pagedkv.ops.checks import FLOATS, check_tensor, check_written, kind, refuse

_merge_attention_states = torch.ops.pagedkv.merge_attention_states.default
WHERE = "merge_attention_states"


def merge_attention_states(
    outs: torch.Tensor,
    lses: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Merge what queries got from disjoint sets of keys into what they get from all of these keys.

    Means, for each token and head::

        lse = log(sum(exp(lses)))
        out = sum(exp(lses[i] - lse) * outs[i] for i in range(num_states))

    taken in float32 and in the order of the states. A state with an `lse` of −inf saw nothing: it is left
    out, whatever its `outs` hold; if all are, the result is 0 and −inf.

    Parameters
    ----------
    outs : Tensor [num_states, num_tokens, num_heads, head_dim]
        float32, bfloat16 or float16.
    lses : Tensor [num_states, num_tokens, num_heads] float32
        Natural logarithms, as `paged_attention` gives them. At most one state may have counted a sink.
    out : Tensor [num_tokens, num_heads, head_dim], optional
        Of the dtype of `outs`. Overwritten and returned; a new tensor by default.
    lse : Tensor [num_tokens, num_heads] float32, optional
        Overwritten.
    backend : str, optional
        As in `paged_attention`.

    Returns
    -------
    Tensor [num_tokens, num_heads, head_dim]

    Raises
    ------
    ShapeError
    BackendUnavailableError
    """
    if not isinstance(outs, torch.Tensor) or outs.ndim != 4 or outs.shape[0] == 0:
        expected = "a tensor [num_states, num_tokens, num_heads, head_dim] of at least one state"
        refuse("outs", expected, kind(outs), WHERE)
    check_tensor("outs", outs, outs.shape, FLOATS, outs.device, WHERE)
    check_tensor("lses", lses, outs.shape[:3], torch.float32, outs.device, WHERE)
    if out is not None:
        check_tensor("out", out, outs.shape[1:], outs.dtype, outs.device, WHERE)
        check_written("out", out, WHERE)
    if lse is not None:
        check_tensor("lse", lse, outs.shape[1:3], torch.float32, outs.device, WHERE)
        check_written("lse", lse, WHERE)

    given = None
    if out is None or out.stride(2) != 1:
        given, out = out, torch.empty_like(outs[0], memory_format=torch.contiguous_format)
    if outs.stride(3) != 1:
        outs = outs.contiguous()
    _merge_attention_states(outs, lses, out, lse, "" if backend is None else check_backend(backend))
    if given is None:
        return out
    with torch.no_grad():
        return given.copy_(out)
