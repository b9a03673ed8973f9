"""What the pool's benchmark prints, writes and draws."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("rich", reason="the benchmark's table needs the extra 'cli'")

if TYPE_CHECKING:
    from benchmarks.running import Outcome

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def source_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmarks are not part of the package."""
    monkeypatch.syspath_prepend(str(ROOT))


@pytest.fixture
def outcomes() -> list[Outcome]:
    """A row that holds in part, and one whose peer is missing."""
    from benchmarks.bounds import absolute, faster, judge
    from benchmarks.running import Outcome
    from benchmarks.table import Row

    warm = Row("warm", "open [hot]", "prompt", (faster(100, "vLLM"), absolute(5)), ("vLLM",))
    cold = Row("cold", "all of it", "prompt", (faster(20, "vLLM"),), ("vLLM",))
    samples = {"pagedkv": [9.0, 11.0, 10.0], "vLLM": [1_500.0]}
    verdicts = [judge(bound, {"pagedkv": 10.0, "vLLM": 1_500.0}) for bound in warm.bounds]
    return [
        Outcome(warm, samples, verdicts, [], 2),
        Outcome(cold, {"pagedkv": [80.0]}, [judge(cold.bounds[0], {"pagedkv": 80.0})], ["no environment"], 1),
    ]


def test_numbers_keep_three_digits_and_all_before_the_point() -> None:
    from benchmarks.report import number

    figures = {0.071234: "0.0712", 4.3149: "4.31", 61.44: "61.4", 999.4: "999", 1298.2: "1,298"}
    assert {value: number(value) for value in figures} == figures


def test_a_line_says_how_a_row_went(outcomes: list[Outcome]) -> None:
    from benchmarks.report import one_line

    assert list(map(one_line, outcomes)) == ["warm: 10 µs; holds, MISSED", "cold: 80 µs; not measured"]


def test_the_table_shows_figures_ratios_verdicts_and_reasons(
    outcomes: list[Outcome], capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks.report import print_report

    print_report(outcomes, "the pool")
    printed = capsys.readouterr().out
    assert "open [hot]" in printed
    assert "1,500" in printed
    assert "150 ×" in printed
    assert "holds, 10 ≤ 15: 100 × faster than vLLM" in printed
    assert "MISSED, 10 > 5: ≤ 5 µs" in printed
    assert "not measured: 20 × faster than vLLM" in printed
    assert "not measured in cold: no environment" in printed
    assert "missed: warm" in printed
    assert "second try" in printed


def test_json_holds_every_figure_and_verdict(outcomes: list[Outcome]) -> None:
    from benchmarks.report import as_json

    written = json.loads(json.dumps(as_json(outcomes, 1)))
    assert written["exit_code"] == 1
    warm, cold = written["rows"]
    assert warm["series"]["pagedkv"] == {"median": 10, "best": 9, "num_samples": 3}
    assert warm["num_tries"] == 2
    assert [bound["holds"] for bound in warm["bounds"]] == [True, False]
    assert warm["bounds"][1] == {"bound": "≤ 5 µs", "limit": 5, "value": 10, "holds": False}
    assert cold["not_measured"] == ["no environment"]
    assert cold["bounds"][0]["holds"] is None


@pytest.fixture
def attention() -> list[Outcome]:
    """What a machine gives, and a row of attention that reaches half of it."""
    from benchmarks.attention_table import F32_GEMM, GEMM, READ, rows
    from benchmarks.running import Outcome

    made = {row.name: row for row in rows(bounded=False, on_gpu=False)}
    return [
        Outcome(made["machine_1t"], {READ: [100.0], GEMM: [5.0], F32_GEMM: [10.0]}, [], [], 1),
        # Slower in the second turn, as was the limit.
        Outcome(made["decode_1t"], {"pagedkv": [20.0, 60.0, 20.0], READ: [10.0, 30.0, 10.0]}, [], [], 1),
    ]


def test_a_row_says_how_much_of_the_limit_it_reaches(
    attention: list[Outcome], capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks.report import as_json, one_line, print_report

    assert [outcome.of_limit for outcome in attention] == [None, 0.5]
    assert one_line(attention[1]) == "decode_1t: 20 µs; no bound here"
    print_report(attention, "attention")
    printed = capsys.readouterr().out
    assert "50%" in printed
    assert "reading once" in printed
    assert as_json(attention, 0)["rows"][1]["of_limit"] == 0.5


def test_a_roofline_is_drawn_with_and_without_the_machine_s_limits(
    attention: list[Outcome], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="the picture needs the extra 'cli'")
    from benchmarks.roofline import draw

    for number, shown in enumerate((attention, attention[1:], [])):
        file = tmp_path / f"{number}.png"
        draw(shown, file)
        assert file.read_bytes().startswith(b"\x89PNG")


def test_a_picture_shows_the_series_that_a_bound_compares_with(outcomes: list[Outcome]) -> None:
    from benchmarks.bounds import at_most
    from benchmarks.report import shown_series

    [row, *_] = outcomes
    assert shown_series(row, "vLLM") == "vLLM"
    assert shown_series(row, "SGLang") is None
    with_both = row._replace(samples={**row.samples, "vLLM, off": [60.0]})
    assert shown_series(with_both, "vLLM") == "vLLM"
    compared = row.row._replace(bounds=(at_most(0.5, "vLLM, off"),))
    assert shown_series(with_both._replace(row=compared), "vLLM") == "vLLM, off"


def test_a_picture_is_drawn_of_the_rows_that_have_peers(outcomes: list[Outcome], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the picture needs the extra 'cli'")
    from benchmarks.report import draw

    file = tmp_path / "pool.png"
    draw(outcomes, file)
    assert file.read_bytes().startswith(b"\x89PNG")


def test_the_command_line_refuses_rows_that_do_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks.pool import parse

    assert parse(["--rows", "warm", "cold"]).rows == ["warm", "cold"]
    for arguments in (["--rows", "warmth"], ["--rounds", "0"]):
        with pytest.raises(SystemExit) as ended:
            parse(arguments)
        assert ended.value.code == 2
    assert "warmth" in capsys.readouterr().err
