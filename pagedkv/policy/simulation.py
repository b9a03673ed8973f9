"""A trace with several policies and sizes: hit rates, evictions, and when the hits came."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.checks import check_int, show
from pagedkv.errors import UsageError
from pagedkv.policy.chains import Chains
from pagedkv.policy.costs import CostModel, Costs
from pagedkv.policy.optimal import Optimum, unlimited_hits
from pagedkv.policy.replay import Progress, Replay, replay
from pagedkv.policy.trace import Trace
from pagedkv.pool import POLICIES
from pagedkv.spec import MAX_BLOCK_SIZE, MAX_BLOCKS

BELADY, INFINITE = "belady", "infinite"
"""Not policies of a pool: they know the future, and need no room."""


@dataclass(frozen=True)
class SimulationResult:
    """What one policy found of a trace with one number of blocks.

    Attributes
    ----------
    policy : str
    blocks : int
        Pages of the pool; for "infinite" the distinct blocks of the trace.
    block_size : int
        Tokens of a block.
    block_hit_rate : float
        Hit blocks by all blocks of the prompts, the partial last ones included; 0 to 1.
    token_hit_rate : float
        Tokens of these, and of runs behind them, by all tokens of the prompts.
    hit_blocks, total_blocks, hit_tokens, total_tokens : int
    evicted_blocks : int
        For want of room.
    requests, refused_requests : int
        All, and those that need more blocks than there are.
    seconds : float
        What the simulation took.
    costs : Costs or None
        What the hits are worth, if a cost model was given.
    hits_by_request : ndarray [num_requests] int64
        Hit blocks of each request.
    """

    policy: str
    blocks: int
    block_size: int
    block_hit_rate: float
    token_hit_rate: float
    hit_blocks: int
    total_blocks: int
    hit_tokens: int
    total_tokens: int
    evicted_blocks: int
    requests: int
    refused_requests: int
    seconds: float
    costs: Costs | None
    hits_by_request: npt.NDArray[np.int64]

    def as_dict(self) -> dict[str, Any]:
        """Return the figures, for JSON; not what each request hit."""
        own = {name: value for name, value in vars(self).items() if name not in ("hits_by_request", "costs")}
        return own | (self.costs._asdict() if self.costs else {})


def simulate(
    trace: Trace,
    *,
    policies: Iterable[str],
    blocks: Iterable[int],
    block_size: int | None = None,
    token_granular: bool = False,
    equal_cost_tokens: int | None = None,
    cost_model: CostModel | None = None,
    progress: Progress | None = None,
) -> Iterator[SimulationResult]:
    """Replay a trace with every policy and every number of blocks, and yield each result.

    Parameters
    ----------
    trace : Trace
    policies : iterable of str
        Those of `BlockPool`; "belady", which knows the future; "infinite", which evicts nothing and is run
        once; or "all" of these.
    blocks : iterable of int
        Pages of the pool.
    block_size : int, optional
        Tokens of a block; by default `Trace.natural_block_size`.
    token_granular : bool
        Also reuse tokens behind the last whole block. The two bounds do not: they count whole blocks.
    equal_cost_tokens : int, optional
        As for `BlockPool`.
    cost_model : CostModel, optional
        Says what the hits are worth.
    progress : callable, optional
        Called with a number of requests done; each result ends with all of them done.

    Raises
    ------
    UsageError
    """
    size = trace.natural_block_size if block_size is None else block_size
    size = check_int("block_size", size, 1, MAX_BLOCK_SIZE)
    sizes = [check_int("blocks", number, 1, MAX_BLOCKS) for number in blocks]
    own = check_policies(policies)
    simulation = _Simulation(trace, size, token_granular, equal_cost_tokens, cost_model, progress)
    return simulation.results(own, sizes)


def check_policies(policies: Iterable[str]) -> list[str]:
    """Return the policies as a list, "all" as all of them; a name that is none raises UsageError."""
    own: list[str] = []
    for policy in policies:
        own += (*POLICIES, BELADY, INFINITE) if policy == "all" else (policy,)
    own = list(dict.fromkeys(own))
    for policy in own:
        if policy not in (*POLICIES, BELADY, INFINITE):
            known = ", ".join((*POLICIES, BELADY, INFINITE))
            raise UsageError(f"policy: expected one of {known}, got {show(policy)}")
    return own


class _Simulation:
    def __init__(
        self,
        trace: Trace,
        size: int,
        token_granular: bool,
        equal_cost_tokens: int | None,
        cost_model: CostModel | None,
        progress: Progress | None,
    ) -> None:
        if not trace.requests:
            raise UsageError("trace: expected at least one request, got none")
        self.trace, self.size = trace, size
        self.token_granular, self.equal_cost_tokens = token_granular, equal_cost_tokens
        self.cost_model, self.progress = cost_model, progress
        self.total_blocks, self.total_tokens = trace.num_blocks(size), trace.num_tokens
        self._chains: Chains | None = None
        self._optimum: Optimum | None = None

    def results(self, policies: list[str], sizes: list[int]) -> Iterator[SimulationResult]:
        for policy in policies:
            for num_blocks in sizes[:1] if policy == INFINITE else sizes:
                yield self._result(policy, num_blocks)

    def _result(self, policy: str, num_blocks: int) -> SimulationResult:
        begin = perf_counter()
        if policy == INFINITE:
            hits = unlimited_hits(self.chains)
            num_blocks = sum(map(len, self.chains.nodes)) - int(hits.sum())
            ran = Replay(hits, self._tokens_of(hits), 0, 0)
        elif policy == BELADY:
            if self._optimum is None:
                self._optimum = Optimum(self.trace, self.chains, self.size)
            hits, num_evicted = self._optimum.hits(num_blocks)
            refused = sum(-(-r.num_tokens // self.size) > num_blocks for r in self.trace.requests)
            ran = Replay(hits, self._tokens_of(hits), num_evicted, refused)
        else:
            ran = replay(
                self.trace,
                policy=policy,
                num_blocks=num_blocks,
                block_size=self.size,
                token_granular=self.token_granular,
                equal_cost_tokens=self.equal_cost_tokens,
                progress=self.progress,
            )
        hit_blocks, hit_tokens = int(ran.hit_blocks.sum()), int(ran.hit_tokens.sum())
        seconds = perf_counter() - begin
        costs = None
        if self.cost_model is not None:
            costs = self.cost_model.costs(self.trace, ran.hit_tokens, num_blocks, self.size)
        return SimulationResult(
            policy=policy,
            blocks=num_blocks,
            block_size=self.size,
            block_hit_rate=hit_blocks / self.total_blocks,
            token_hit_rate=hit_tokens / self.total_tokens,
            hit_blocks=hit_blocks,
            total_blocks=self.total_blocks,
            hit_tokens=hit_tokens,
            total_tokens=self.total_tokens,
            evicted_blocks=ran.num_evicted_blocks,
            requests=len(self.trace.requests),
            refused_requests=ran.num_refused,
            seconds=seconds,
            costs=costs,
            hits_by_request=ran.hit_blocks,
        )

    def _tokens_of(self, hit_blocks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        lengths = [request.num_tokens for request in self.trace.requests]
        return np.minimum(hit_blocks * self.size, lengths)

    @property
    def chains(self) -> Chains:
        if self._chains is None:
            self._chains = Chains(self.trace, self.size)
        return self._chains
