"""What hits are worth: operations and seconds of prefill, and the memory that it takes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pagedkv.policy.models import Model
from pagedkv.policy.trace import Trace

GIB = 2**30


class Costs(NamedTuple):
    """A simulation's result in a model's terms.

    Attributes
    ----------
    prefill_flops, saved_prefill_flops : float
        Operations that all prompts need without reuse, and those of the tokens that were found.
    prefill_seconds, saved_prefill_seconds : float
        The same on a device that does so many in a second.
    memory_gib : float
        KV of all blocks of the pool, in all layers.
    """

    prefill_flops: float
    saved_prefill_flops: float
    prefill_seconds: float
    saved_prefill_seconds: float
    memory_gib: float


class CostModel:
    """Prices tokens of a trace by a model: its matrices for every token, and attention over what precedes it.

    Parameters
    ----------
    model : Model
    flops_per_s : float
        What the device does in a second of prefill: its peak times what of it is reached.
    """

    def __init__(self, model: Model, flops_per_s: float) -> None:
        self.model = model
        self.flops_per_s = flops_per_s

    def costs(
        self, trace: Trace, hit_tokens: npt.NDArray[np.int64], num_blocks: int, block_size: int
    ) -> Costs:
        """Return what the hits of each request are worth; the last token of a prompt is always computed."""
        flops = self.model.prefill_flops
        lengths = [request.num_tokens for request in trace.requests]
        total = float(sum(flops(0, length) for length in lengths))
        found = np.minimum(hit_tokens, np.array(lengths) - 1).tolist()
        saved = float(sum(flops(0, tokens) for tokens in found))
        memory = num_blocks * block_size * self.model.bytes_per_token() / GIB
        return Costs(total, saved, total / self.flops_per_s, saved / self.flops_per_s, memory)
