"""What a provider's prompt cache costs and saves: by reuse counts in a formula, and on a trace.

With an input token as the unit, a write costs *w*, a read *r*. A prefix of P tokens that is used N times
while it is kept costs ``P · N`` without a cache and ``P · (w + (N − 1) · r)`` with one: it pays from the
first N above ``(w − r) / (1 − r)``.
"""

from __future__ import annotations

from fractions import Fraction
from math import floor, inf
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pagedkv.checks import check_int, check_number
from pagedkv.errors import UsageError
from pagedkv.policy.chains import Chains
from pagedkv.policy.trace import Trace

FORMULA = "without: P · N    with: P · (w + (N − 1) · r)    pays above N = (w − r) / (1 − r)"


class Rules(NamedTuple):
    """Prices and terms of a cache, with an input token as the unit of price.

    Attributes
    ----------
    name : str
    write, read : float
        Price of a token that is written, and of one that is read.
    ttl_s : float
        Seconds that what was written or read is kept from then on.
    min_tokens : int
        A shorter prefix is neither written nor read.
    step_tokens : int
        Tokens read count in multiples of this.
    """

    name: str
    write: float
    read: float
    ttl_s: float
    min_tokens: int
    step_tokens: int

    def checked(self) -> Rules:
        """Return the rules; UsageError for a price or a term that is none."""
        check_number("write", self.write)
        check_number("read", self.read)
        if not self.ttl_s > 0:
            raise UsageError(f"ttl_s: expected more than 0, got {self.ttl_s:g}")
        check_int("min_tokens", self.min_tokens, 0, 2**31 - 1)
        check_int("step_tokens", self.step_tokens, 1, 2**31 - 1)
        return self

    @property
    def threshold(self) -> float:
        """Uses at which both cost the same; inf when a read saves nothing."""
        # Prices come as decimals: as such, not as binary fractions, they give a threshold that is exact.
        write, read = Fraction(str(self.write)), Fraction(str(self.read))
        if read >= 1:
            return inf
        return float((write - read) / (1 - read))

    @property
    def first_use_that_pays(self) -> int | None:
        """Least number of uses that costs less with the cache; None when none does."""
        return None if self.threshold == inf else max(1, floor(self.threshold) + 1)

    def cost(self, num_tokens: int, uses: int) -> float:
        """Return the price of a prefix of so many tokens, used so often, each time while it is kept."""
        if num_tokens < self.min_tokens or not uses:
            return float(num_tokens * uses)
        step_end = num_tokens // self.step_tokens * self.step_tokens
        read = step_end * self.read + (num_tokens - step_end)
        return num_tokens * self.write + (uses - 1) * read


PROVIDERS = {
    "anthropic-5m": Rules("anthropic-5m", 1.25, 0.1, 300, 1024, 1),
    "anthropic-1h": Rules("anthropic-1h", 2.0, 0.1, 3600, 1024, 1),
    "openai": Rules("openai", 1.0, 0.5, 300, 1024, 128),
}
"""Rules as published; prices and least lengths differ by model, and OpenAI keeps for 5 to 10 minutes."""


class Bill(NamedTuple):
    """What a trace's prompts cost under rules, with an input token as the unit.

    Attributes
    ----------
    rules : Rules
    without : int
        Tokens of all prompts.
    read_tokens, written_tokens : int
        With every prompt marked at its end: all that is not read is written.
    cost : float
        Then.
    read_again_tokens : int
        Of the written tokens those that are read while they are kept.
    cost_read_again : float
        With marks, in hindsight, at the end of these: what is not read again is not written.
    """

    rules: Rules
    without: int
    read_tokens: int
    written_tokens: int
    cost: float
    read_again_tokens: int
    cost_read_again: float


def bill_trace(
    trace: Trace, rules: Rules, *, block_size: int | None = None, chains: Chains | None = None
) -> Bill:
    """Go through a trace by its times and bill every prompt.

    What two prompts have in common is known to whole blocks. How many marks a prompt may have, and how far
    back they are looked for, is not counted.

    Parameters
    ----------
    trace : Trace
    rules : Rules
    block_size : int, optional
        By default `Trace.natural_block_size`.
    chains : Chains, optional
        Of the same trace and block size, if there.
    """
    rules = rules.checked()
    size = trace.natural_block_size if block_size is None else block_size
    chains = Chains(trace, size) if chains is None else chains
    kept_until = np.full(chains.num_nodes, -inf)
    next_uses = _next_use_times(trace, chains)
    read = written = again = 0
    for request, nodes, next_use in zip(trace.requests, chains.nodes, next_uses, strict=True):
        length = request.num_tokens
        if length < rules.min_tokens:
            continue
        live = kept_until[nodes] >= request.time_s
        found = len(nodes) if live.all() else int(live.argmin())
        tokens = min(found * size, length) // rules.step_tokens * rules.step_tokens
        if tokens < rules.min_tokens:
            tokens = 0
        useful = min(int(np.count_nonzero(next_use <= request.time_s + rules.ttl_s)) * size, length)
        read += tokens
        written += length - tokens
        again += max(0, useful - tokens)
        kept_until[nodes] = request.time_s + rules.ttl_s
    without = trace.num_tokens
    rest = without - read - written
    cost = rest + written * rules.write + read * rules.read
    cost_read_again = without - read - again + again * rules.write + read * rules.read
    return Bill(rules, without, read, written, cost, again, cost_read_again)


def _next_use_times(trace: Trace, chains: Chains) -> list[npt.NDArray[np.float64]]:
    """For each request the times at which its blocks are used next; inf for never."""
    upcoming = np.full(chains.num_nodes, inf)
    times = []
    for request, nodes in zip(reversed(trace.requests), reversed(chains.nodes), strict=True):
        times.append(upcoming[nodes])
        upcoming[nodes] = request.time_s
    return times[::-1]
