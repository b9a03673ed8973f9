"""What the kernels run on, and how one is launched."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from triton.runtime.jit import JITFunction

from pagedkv.errors import BackendUnavailableError
from pagedkv.kernels.triton import numbers

INTERPRETING = not isinstance(numbers.tanh, JITFunction)
"""Whether TRITON_INTERPRET=1 was set when the kernels were made: then they run in Python, on the CPU."""


class Launch(NamedTuple):
    """A kernel with all that it is given; one that nothing has to be done for is not made."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 1


def run(launch: Launch) -> None:
    """Launch on the current stream of the current device."""
    # Without contraction, so that one expression has the same bits in every kernel that holds it.
    launch.kernel[launch.grid](
        **launch.arguments,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        enable_fp_fusion=False,
    )


def why_unavailable() -> str | None:
    """Say what is missing for any kernel to run here."""
    if INTERPRETING or torch.cuda.is_available():
        return None
    return "torch sees no GPU, and TRITON_INTERPRET=1 was not set before triton was imported"


def target_of(device: torch.device) -> str:
    """Return what the kernels are compiled for, such as ``sm90``, ``gfx942`` or ``interpret``.

    Raises
    ------
    BackendUnavailableError
        When kernels can't run on tensors of `device`.
    """
    if INTERPRETING:
        return "interpret"
    if device.type != "cuda":
        raise BackendUnavailableError(
            f"backend: expected tensors on a GPU for 'triton', got tensors on {device}"
        )
    return _gpu(device.index if device.index is not None else torch.cuda.current_device())[0]


def count_multiprocessors(device: torch.device) -> int:
    """Return how many tiles the device works on side by side."""
    if INTERPRETING:
        return 2  # so that small batches split their keys and larger ones do not
    return _gpu(device.index if device.index is not None else torch.cuda.current_device())[1]


@cache
def _gpu(index: int) -> tuple[str, int]:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        return properties.gcnArchName.partition(":")[0], properties.multi_processor_count
    return f"sm{properties.major}{properties.minor}", properties.multi_processor_count
