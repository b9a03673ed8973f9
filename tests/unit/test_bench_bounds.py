"""What the pool's benchmark calls a bound that holds, and what its exit status says."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def source_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmarks are not part of the package."""
    monkeypatch.syspath_prepend(str(ROOT))


def test_a_bound_holds_up_to_its_limit_and_not_beyond() -> None:
    from benchmarks.bounds import absolute, at_most, faster, judge

    assert judge(absolute(60), {"pagedkv": 60.0}).holds is True
    assert judge(absolute(60), {"pagedkv": 60.1}).holds is False
    assert judge(at_most(1.5, "floor"), {"pagedkv": 15.0, "floor": 10.0}).holds is True
    assert judge(at_most(1.5, "floor"), {"pagedkv": 15.1, "floor": 10.0}).holds is False
    assert judge(faster(4, "other"), {"pagedkv": 25.0, "other": 100.0}).holds is True
    assert judge(faster(4, "other"), {"pagedkv": 25.1, "other": 100.0}).holds is False


def test_a_limit_may_be_a_sum() -> None:
    from benchmarks.bounds import Bound, judge

    bound = Bound("salt", ((1.05, "plain"), (64, "one compression")), 2.0)
    verdict = judge(bound, {"salt": 110.0, "plain": 100.0, "one compression": 0.05})
    assert verdict.limit == pytest.approx(105 + 3.2 + 2)
    assert verdict.holds is True
    assert judge(bound, {"salt": 110.3, "plain": 100.0, "one compression": 0.05}).holds is False


def test_a_bound_is_not_judged_without_both_sides() -> None:
    from benchmarks.bounds import Verdict, at_most, judge

    bound = at_most(2, "floor")
    assert judge(bound, {"pagedkv": 1.0}) == Verdict(bound, None, 1.0, None)
    assert judge(bound, {"floor": 1.0}) == Verdict(bound, None, None, None)


def test_a_bound_reads_as_the_table_says_it() -> None:
    from benchmarks.bounds import Bound, absolute, at_most, faster

    assert faster(120, "vLLM").text("µs") == "120 × faster than vLLM"
    assert faster(1.3, "one by one").text("µs") == "1.3 × faster than one by one"
    assert at_most(1.2, "bare loop", "native chain").text("µs") == "native chain: ≤ 1.2 × bare loop"
    assert absolute(1_000).text("µs") == "≤ 1,000 µs"
    assert absolute(240).text("bytes") == "≤ 240 bytes"
    sum_of_two = Bound("salt", ((1.05, "plain"), (64.0, "one compression")))
    assert sum_of_two.text("µs") == "salt: ≤ 1.05 × plain + 64 × one compression"


def test_exit_status_puts_a_miss_before_what_is_unknown() -> None:
    from benchmarks.bounds import Verdict, absolute, exit_code

    held, missed, unknown = (Verdict(absolute(1), 1.0, 1.0, holds) for holds in (True, False, None))
    assert exit_code([], all_measured=True) == 0
    assert exit_code([held, held], all_measured=True) == 0
    assert exit_code([held, missed], all_measured=True) == 1
    assert exit_code([held, unknown], all_measured=True) == 3
    assert exit_code([held], all_measured=False) == 3
    assert exit_code([missed, unknown], all_measured=False) == 1


def test_every_row_has_a_bound_and_a_harness_that_knows_it() -> None:
    from benchmarks.child import COMMANDS
    from benchmarks.table import ROWS
    from benchmarks.work import giant, rows

    ours = {"pagedkv": rows.ROWS, "pagedkv, 10 million blocks": giant.ROWS}
    assert len({row.name for row in ROWS}) == len(ROWS)
    for row in ROWS:
        assert row.bounds, row.name
        assert row.name in ours[row.harness], row.name
        assert set(row.peers) <= set(COMMANDS), row.name
    assert {row.name for row in ROWS} == {name for known in ours.values() for name in known}


def test_a_row_names_the_peers_that_its_bounds_compare_with() -> None:
    from benchmarks.table import ROWS

    for row in ROWS:
        compared = {series.split(",")[0] for bound in row.bounds for _, series in bound.terms}
        assert compared & {"vLLM", "SGLang"} <= set(row.peers), row.name
