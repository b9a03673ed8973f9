"""Belady on a tree is what exhaustive search finds, and no policy of the pool beats it."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkv import UsageError
from pagedkv.policy import Request, Trace, make_trace, simulate
from pagedkv.pool import POLICIES

BLOCK = 4


def trace_of(prompts: list[list[int]], salts: list[str | None] | None = None) -> Trace:
    chosen = salts or [None] * len(prompts)
    return make_trace(
        "drawn",
        (
            Request(float(n), len(prompt), 0, salt, np.array(prompt, np.uint32), 1)
            for n, (prompt, salt) in enumerate(zip(prompts, chosen, strict=True))
        ),
    )


def hits(trace: Trace, policy: str, num_blocks: int, block_size: int = BLOCK) -> list[int]:
    [result] = simulate(trace, policies=[policy], blocks=[num_blocks], block_size=block_size)
    return result.hits_by_request.tolist()


def best_by_search(prompts: list[list[int]], num_blocks: int) -> int:
    """Try every set of blocks that could be kept, leaves or not, and count the most hits."""
    best = {frozenset[tuple[int, ...]](): 0}
    for prompt in prompts:
        pages = -(-len(prompt) // BLOCK)
        if pages > num_blocks:
            continue
        path = [tuple(prompt[: end + BLOCK]) for end in range(0, len(prompt) - BLOCK + 1, BLOCK)]
        after: dict[frozenset[tuple[int, ...]], int] = {}
        for there, count in best.items():
            found = 0
            while found < len(path) and path[found] in there:
                found += 1
            others = there - set(path)
            room = num_blocks - pages
            for kept in combinations(sorted(others), min(room, len(others))):
                state = frozenset(kept) | frozenset(path)
                after[state] = max(after.get(state, 0), count + found)
        best = after
    return max(best.values())


# A prompt over few tokens, block by block, so that paths branch; the end may be partial.
BLOCKS = st.lists(st.integers(0, 2), min_size=1, max_size=4)
PROMPTS = st.builds(
    lambda blocks, cut: [token for block in blocks for token in [block] * BLOCK][
        : max(1, len(blocks) * BLOCK - cut)
    ],
    BLOCKS,
    st.integers(0, BLOCK - 1),
)


@given(st.lists(PROMPTS, min_size=1, max_size=7), st.integers(1, 6))
def test_belady_hits_as_many_as_exhaustive_search(prompts: list[list[int]], num_blocks: int) -> None:
    assert sum(hits(trace_of(prompts), "belady", num_blocks)) == best_by_search(prompts, num_blocks)


LONG = st.lists(st.tuples(PROMPTS, st.sampled_from([None, "a"])), min_size=1, max_size=60)


@pytest.mark.parametrize("policy", POLICIES)
@given(LONG, st.integers(1, 12))
def test_no_policy_beats_belady_and_belady_not_the_endless_pool(
    policy: str, asked: list[tuple[list[int], str | None]], num_blocks: int
) -> None:
    trace = trace_of([prompt for prompt, _ in asked], [salt for _, salt in asked])
    [real, best] = simulate(trace, policies=[policy, "belady"], blocks=[num_blocks], block_size=BLOCK)
    [endless] = simulate(trace, policies=["infinite"], blocks=[num_blocks], block_size=BLOCK)
    assert real.hit_blocks <= best.hit_blocks <= endless.hit_blocks
    assert real.hit_tokens <= best.hit_tokens <= endless.hit_tokens
    assert real.refused_requests == best.refused_requests


@given(LONG, st.integers(1, 12), st.integers(0, 12))
def test_more_blocks_never_cost_belady_a_hit(
    asked: list[tuple[list[int], str | None]], num_blocks: int, more: int
) -> None:
    trace = trace_of([prompt for prompt, _ in asked], [salt for _, salt in asked])
    fewer, most = (sum(hits(trace, "belady", size)) for size in (num_blocks, num_blocks + more))
    assert fewer <= most


def test_a_pool_larger_than_its_trace_is_made_no_larger() -> None:
    trace = trace_of([[1] * 8, [1] * 8])
    for policy in POLICIES:
        [result] = simulate(trace, policies=[policy], blocks=[2**31 - 128], block_size=BLOCK)
        assert (result.blocks, result.hit_blocks) == (2**31 - 128, 2)


def test_all_stands_for_every_policy_once() -> None:
    found = simulate(trace_of([[1] * 8]), policies=["lru", "all"], blocks=[4])
    assert [result.policy for result in found] == [*POLICIES, "belady", "infinite"]


@given(LONG)
def test_with_room_for_all_the_pool_hits_what_the_endless_one_does(
    asked: list[tuple[list[int], str | None]],
) -> None:
    trace = trace_of([prompt for prompt, _ in asked], [salt for _, salt in asked])
    room = trace.num_blocks(BLOCK)
    expected = hits(trace, "infinite", 1)
    assert hits(trace, "lru", room) == expected
    assert hits(trace, "belady", room) == expected


@given(st.lists(PROMPTS, min_size=1, max_size=30), st.sampled_from([1, 2, 4, 8, 3]))
def test_named_blocks_and_their_tokens_hit_alike_at_any_block_size(
    prompts: list[list[int]], block_size: int
) -> None:
    def name(tokens: list[int]) -> list[int]:
        return [token * 8 for token in tokens[::8]]

    named = make_trace(
        "named",
        (Request(0.0, len(prompt), 0, None, np.array(name(prompt), np.uint32), 8) for prompt in prompts),
    )
    plain = make_trace(
        "plain",
        (
            Request(0.0, len(tokens), 0, None, tokens, 1)
            for tokens in (request.replayed_tokens(block_size) for request in named.requests)
        ),
    )
    for policy in ("infinite", "belady", "lru"):
        assert hits(named, policy, 12, block_size) == hits(plain, policy, 12, block_size)


def test_a_whole_prompt_that_is_there_counts_all_its_blocks_and_tokens() -> None:
    prompt = list(range(3 * BLOCK))
    [result] = simulate(trace_of([prompt, prompt]), policies=["lru"], blocks=[8], block_size=BLOCK)
    assert (result.hit_blocks, result.hit_tokens) == (3, 3 * BLOCK)
    assert (result.block_hit_rate, result.token_hit_rate) == (0.5, 0.5)


def test_tokens_behind_the_last_whole_block_count_when_asked_for() -> None:
    trace = trace_of([list(range(8)), [0, 1, 2, 3, 4, 5, 99, 98]])
    for wanted, tokens in ((False, 4), (True, 6)):
        [result] = simulate(trace, policies=["lru"], blocks=[8], block_size=BLOCK, token_granular=wanted)
        assert (result.hit_blocks, result.hit_tokens) == (1, tokens)


def test_a_request_too_large_for_the_pool_is_refused_and_counted() -> None:
    trace = trace_of([[1] * 4, [2] * 40, [1] * 4])
    for policy in ("lru", "belady"):
        [result] = simulate(trace, policies=[policy], blocks=[3], block_size=BLOCK)
        assert result.hits_by_request.tolist() == [0, 0, 1]
        assert result.refused_requests == 1
        assert result.total_blocks == 12


def test_the_partial_last_block_of_tokens_counts_and_is_never_hit() -> None:
    [result] = simulate(trace_of([[1] * 6] * 2), policies=["lru"], blocks=[9], block_size=BLOCK)
    assert (result.hit_blocks, result.total_blocks) == (1, 4)


@pytest.mark.parametrize(("policy", "blocks"), [("no such", 4), ("lru", 0), ("belady", 0)])
def test_what_no_pool_can_be_is_refused(policy: str, blocks: int) -> None:
    with pytest.raises(UsageError):
        list(simulate(trace_of([[1] * 8]), policies=[policy], blocks=[blocks]))
