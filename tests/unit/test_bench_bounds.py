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


def test_of_series_that_took_turns_the_median_turn_decides() -> None:
    from benchmarks.bounds import at_most, judge_pairs

    # The machine was slower in two turns of five; the medians alone would say 30 against 11.
    ours, other = [10.0, 10.0, 30.0, 30.0, 30.0], [11.0, 11.0, 33.0, 33.0, 11.0]
    verdict = judge_pairs(at_most(1, "other"), {"pagedkv": ours, "other": other})
    assert verdict.holds is True
    assert verdict.value == pytest.approx(11 * 10 / 11)
    assert judge_pairs(at_most(0.9, "other"), {"pagedkv": ours, "other": other}).holds is False
    assert judge_pairs(at_most(1, "other"), {"pagedkv": ours}).holds is None


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


def test_attention_is_bounded_by_what_holds_anywhere_and_elsewhere_by_its_tiles() -> None:
    from benchmarks.attention_table import rows

    here, elsewhere = (
        {row.name: row for row in rows(bounded=is_amx, on_gpu=False)} for is_amx in (True, False)
    )
    assert here.keys() == elsewhere.keys()
    for name, row in elsewhere.items():
        assert set(row.bounds) <= set(here[name].bounds)
    stated = {name for name, row in elsewhere.items() if not row.bounds}
    works = ("machine", "decode", "decode_int8", "decode_small", "prefill_cached", "prefill", "shared")
    assert stated == {f"{name}_{number}t" for name in works for number in (1, 2)}
    assert {row.name for row in rows(bounded=False, on_gpu=True)} == {n for n in here if n.endswith("_1t")}


def test_what_must_be_read_and_multiplied_is_counted_once() -> None:
    from benchmarks.shapes import Batch

    batch = Batch(4, 3, 48, num_heads=6, num_kv_heads=2, head_dim=8, num_shared=32)
    seen_by_a_query = (46, 47, 48)
    assert batch.num_operations == 4 * sum(4 * 6 * 8 * keys for keys in seen_by_a_query)
    assert batch.kv_bytes() == (32 + 4 * 16) * 2 * 2 * 8 * 2
    assert batch.kv_bytes(1, once=False) == 4 * 48 * 2 * 2 * 8


def test_the_benchmark_of_attention_says_plainly_that_there_is_no_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("rich", reason="the benchmark's table needs the extra 'cli'")
    from benchmarks import attention

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert attention.main(["--device", "cuda"]) == 3
    assert "expected a GPU" in capsys.readouterr().err
