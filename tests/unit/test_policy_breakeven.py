"""A bill sums what the rules say, and the formula's threshold is where the two costs cross."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkv import UsageError
from pagedkv.policy import PROVIDERS, Request, Rules, Trace, bill_trace, make_trace

PRICES = st.integers(0, 300).map(lambda hundredths: hundredths / 100)


def rules(write: float = 1.25, read: float = 0.1, ttl_s: float = 300, low: int = 0, step: int = 1) -> Rules:
    return Rules("drawn", write, read, ttl_s, low, step)


@pytest.mark.parametrize(
    ("name", "threshold", "pays"),
    [("anthropic-5m", 1.15 / 0.9, 2), ("anthropic-1h", 1.9 / 0.9, 3), ("openai", 1, 2)],
)
def test_the_known_rules_pay_from_a_known_use(name: str, threshold: float, pays: int) -> None:
    assert PROVIDERS[name].threshold == pytest.approx(threshold)
    assert PROVIDERS[name].first_use_that_pays == pays


@given(PRICES, PRICES)
def test_the_first_use_that_pays_is_the_first_that_costs_less(write: float, read: float) -> None:
    pays = rules(write, read).first_use_that_pays
    cheaper = [uses for uses in range(1, 400) if rules(write, read).cost(100, uses) < 100 * uses - 1e-6]
    if pays is None:
        assert not cheaper or write < 1
    elif pays < 400:
        assert cheaper[0] == pays


def test_what_is_too_short_costs_what_it_would_without() -> None:
    assert rules(low=1024).cost(1023, 5) == 5 * 1023
    assert rules(low=1024).cost(1024, 2) == 1024 * 1.35
    assert rules(1, 0.5, low=1024, step=128).cost(1100, 2) == 1100 + 1024 * 0.5 + 76


BLOCK = 16


def trace_of(*asked: tuple[float, list[int]]) -> Trace:
    """Prompts by time, each of blocks that are one token repeated."""
    return make_trace(
        "t",
        (
            Request(time_s, len(blocks) * BLOCK, 0, None, np.repeat(np.array(blocks, np.uint32), BLOCK), 1)
            for time_s, blocks in asked
        ),
    )


def test_a_prefix_is_read_while_it_is_kept_and_a_read_keeps_it_longer() -> None:
    trace = trace_of((0, [1, 2]), (300, [1, 3]), (600, [1]), (901, [1]))
    bill = bill_trace(trace, rules())
    assert bill.read_tokens == 2 * BLOCK
    assert bill.written_tokens == (2 + 1 + 0 + 1) * BLOCK
    assert bill.cost == (4 * 1.25 + 2 * 0.1) * BLOCK
    assert bill.read_again_tokens == BLOCK  # the very first block
    assert bill.cost_read_again == (1 * 1.25 + 2 * 0.1 + 3) * BLOCK
    assert bill.without == 6 * BLOCK


def test_short_prompts_and_short_prefixes_are_neither_read_nor_written() -> None:
    trace = trace_of((0, [1, 2, 3]), (1, [1, 2, 4]), (2, [1]))
    bill = bill_trace(trace, rules(low=3 * BLOCK))
    assert (bill.read_tokens, bill.written_tokens) == (0, 6 * BLOCK)
    assert bill.cost == (6 * 1.25 + 1) * BLOCK


def test_reads_count_in_steps() -> None:
    bill = bill_trace(trace_of((0, [1, 2, 3]), (1, [1, 2, 3])), rules(1, 0.5, step=2 * BLOCK))
    assert bill.read_tokens == 2 * BLOCK
    assert bill.cost == (3 + 1 + 1) * BLOCK


TRACES = st.lists(
    st.tuples(st.integers(0, 40), st.lists(st.integers(0, 2), min_size=1, max_size=4)), max_size=20
).map(lambda asked: trace_of(*((float(time_s), blocks) for time_s, blocks in asked)))


@given(TRACES, PRICES, PRICES, st.integers(1, 20), st.sampled_from([0, 20, 40]), st.sampled_from([1, 16, 24]))
def test_a_bill_equals_one_made_token_by_token(
    trace: Trace, write: float, read: float, ttl_s: int, low: int, step: int
) -> None:
    own = rules(write, read, ttl_s, low, step)
    kept: dict[tuple[int, ...], float] = {}
    expected = 0.0
    for request in trace.requests:
        tokens, length = request.content.tolist(), request.num_tokens
        if length < low:
            expected += length
            continue
        prefixes = [tuple(tokens[:end]) for end in range(BLOCK, length + 1, BLOCK)]
        found = 0
        while found < len(prefixes) and kept.get(prefixes[found], -inf) >= request.time_s:
            found += 1
        hit = found * BLOCK // step * step
        hit = hit if hit >= low else 0
        expected += hit * read + (length - hit) * write
        kept.update((prefix, request.time_s + ttl_s) for prefix in prefixes)
    bill = bill_trace(trace, own, block_size=BLOCK)
    assert bill.cost == pytest.approx(expected)
    if write >= 1:
        assert bill.cost_read_again <= bill.cost + 1e-9
    assert bill.read_again_tokens <= bill.written_tokens


@pytest.mark.parametrize("wrong", [rules(-1), rules(read=inf), rules(ttl_s=0), rules(low=-1), rules(step=0)])
def test_rules_that_are_none_are_refused(wrong: Rules) -> None:
    with pytest.raises(UsageError):
        bill_trace(trace_of((0, [1])), wrong)
