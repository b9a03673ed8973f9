"""A request's usage counts every token of its prompt once, each where it belongs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pagedkv import BlockPool, Breakpoint, Sequence, Usage

BLOCK_SIZE = 4
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=40)


def run(pool: BlockPool, tokens: list[int], breakpoints: list[Breakpoint] | None = None) -> Sequence:
    seq = pool.open(tokens, breakpoints=breakpoints)
    pool.commit(pool.reserve(seq, seq.num_uncached_tokens))
    return seq


@st.composite
def breakpoints_of(draw: st.DrawFn, num_tokens: int) -> list[Breakpoint]:
    count = draw(st.integers(0, min(4, num_tokens)))
    positions = draw(st.sets(st.integers(1, num_tokens), min_size=count, max_size=count))
    times_s = draw(st.lists(st.sampled_from([60.0, 300.0, 3600.0]), min_size=count, max_size=count))
    return [Breakpoint(*pair) for pair in zip(sorted(positions), sorted(times_s, reverse=True), strict=True)]


def counted(tokens: list[int], num_found: int, num_blocks_found: int, breakpoints: list[Breakpoint]) -> Usage:
    """Ask of every token by itself what becomes of it."""
    usage = Usage(0, num_found, {})
    for position in range(num_found, len(tokens)):
        block = position // BLOCK_SIZE
        times_s = [ttl_s for end, ttl_s in breakpoints if (block + 1) * BLOCK_SIZE <= end]
        if times_s and block >= num_blocks_found:
            longest_s = max(times_s)
            usage.cache_write_by_ttl[longest_s] = usage.cache_write_by_ttl.get(longest_s, 0) + 1
        else:
            usage = usage._replace(input=usage.input + 1)
    return usage


@given(st.lists(PROMPTS, max_size=4), PROMPTS, st.data())
def test_usage_is_what_becomes_of_each_token(
    earlier: list[list[int]], tokens: list[int], data: st.DataObject
) -> None:
    pool = BlockPool(64, block_size=BLOCK_SIZE)
    for prompt in earlier:
        run(pool, prompt).close()
    breakpoints = data.draw(breakpoints_of(len(tokens)))
    match = pool.match(tokens)
    num_found = min(match.num_tokens, len(tokens) - 1)
    seq = run(pool, tokens, breakpoints)
    expected = counted(tokens, num_found, match.num_block_tokens // BLOCK_SIZE, breakpoints)
    assert seq.usage == expected
    assert seq.usage.num_tokens == len(tokens)


def test_appended_tokens_are_no_part_of_the_usage() -> None:
    pool = BlockPool(8)
    seq = run(pool, list(range(20)), [Breakpoint(20, 300)])
    before = seq.usage
    assert before == Usage(4, 0, {300.0: 16})
    pool.append(seq, list(range(30)))
    pool.commit(pool.reserve(seq, 30))
    assert seq.usage == before
    seq.preempt()
    assert seq.usage == before


def test_a_prompt_that_is_all_there_writes_nothing_although_its_last_token_is_computed() -> None:
    pool = BlockPool(8)
    run(pool, list(range(32))).close()
    assert run(pool, list(range(32)), [Breakpoint(32, 300)]).usage == Usage(1, 31, {})


def test_what_a_quota_keeps_unpublished_is_not_written() -> None:
    pool = BlockPool(64, block_size=BLOCK_SIZE)
    pool.set_quota("t", 2)
    seq = pool.open(range(40), cache_salt="t", breakpoints=[Breakpoint(40, 3600)])
    pool.commit(pool.reserve(seq, seq.num_uncached_tokens))
    assert pool.tenant_usage("t").num_blocks == 2
    assert seq.usage == Usage(32, 0, {3600.0: 8})
    pool.set_quota("t", None)
    pool.append(seq, 1)
    pool.commit(pool.reserve(seq, 1))
    assert seq.usage == Usage(0, 0, {3600.0: 40})
