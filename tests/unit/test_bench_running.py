"""How the pool's benchmark takes turns, tries again, and goes on without what it can't measure."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from benchmarks.running import Harness

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def source_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmarks are not part of the package."""
    monkeypatch.syspath_prepend(str(ROOT))


class Scripted:
    """A harness whose figures are known, and which writes down who was asked when."""

    def __init__(self, name: str, figures: list[dict[str, float]], turns: list[str]) -> None:
        self.name, self.turns = name, turns
        self.figures: Iterator[dict[str, float]] = iter(figures)

    def begin(self, row: str) -> None:
        self.turns.append(f"{self.name} begins {row}")

    def round(self) -> dict[str, list[float]]:
        self.turns.append(self.name)
        return {series: [figure] for series, figure in next(self.figures).items()}


class Absent:
    """A harness that has no environment."""

    def begin(self, row: str) -> None:
        from benchmarks.child import NotMeasuredError

        raise NotMeasuredError("there is no environment")

    def round(self) -> dict[str, list[float]]:
        raise AssertionError("asked for a round of a row that did not begin")


def quiet(message: str) -> None:
    """Progress that nobody watches."""


def test_harnesses_take_turns_in_every_round() -> None:
    from benchmarks.bounds import faster
    from benchmarks.running import run
    from benchmarks.table import Row

    turns: list[str] = []
    row = Row("warm", "open", "prompt", (faster(2, "vLLM"),), ("vLLM",))
    harnesses = {
        "pagedkv": Scripted("pagedkv", [{"pagedkv": t} for t in (1, 9, 2)], turns),
        "vLLM": Scripted("vLLM", [{"vLLM": t} for t in (10, 30, 20)], turns),
    }
    outcome = run(row, harnesses, 3, quiet)
    assert turns == ["pagedkv begins warm", "pagedkv", "vLLM begins warm", "vLLM", *["pagedkv", "vLLM"] * 2]
    assert outcome.medians == {"pagedkv": 2, "vLLM": 20}
    assert (outcome.num_tries, outcome.is_missed, outcome.reasons) == (1, False, [])


def test_a_missed_bound_is_measured_once_more_and_the_second_try_decides() -> None:
    from benchmarks.bounds import absolute
    from benchmarks.running import run
    from benchmarks.table import Row

    row = Row("warm", "open", "prompt", (absolute(5),))
    for second, is_missed in ((4, False), (6, True)):
        turns: list[str] = []
        figures: list[dict[str, float]] = [{"pagedkv": 6}, {"pagedkv": second}, {"pagedkv": 1}]
        outcome = run(row, {"pagedkv": Scripted("pagedkv", figures, turns)}, 1, quiet)
        assert turns == ["pagedkv begins warm", "pagedkv"] * 2
        assert outcome.samples == {"pagedkv": [second]}
        assert (outcome.num_tries, outcome.is_missed) == (2, is_missed)


def test_a_peer_that_is_not_there_leaves_the_rest_measured() -> None:
    from benchmarks.bounds import absolute, exit_code, faster
    from benchmarks.running import run
    from benchmarks.table import Row

    row = Row("warm", "open", "prompt", (absolute(5), faster(2, "vLLM")), ("vLLM",))
    ours = Scripted("pagedkv", [{"pagedkv": 4}] * 2, [])
    harnesses: dict[str, Harness] = {"pagedkv": ours, "vLLM": Absent()}
    outcome = run(row, harnesses, 2, quiet)
    assert outcome.samples == {"pagedkv": [4, 4]}
    assert [verdict.holds for verdict in outcome.verdicts] == [True, None]
    assert outcome.reasons == ["there is no environment"]
    assert exit_code(outcome.verdicts, all_measured=not outcome.reasons) == 3


def test_a_harness_gives_a_round_when_asked_and_starts_a_row_afresh() -> None:
    from benchmarks.harness import serve

    made: list[str] = []

    def source(name: str) -> Iterator[dict[str, list[float]]]:
        made.append(name)
        for number in range(10):
            yield {name: [float(number)]}

    replies = io.StringIO()
    asked = io.StringIO("begin a\nround\nround\nbegin b\nround\nbegin a\nround\n")
    serve({"a": lambda: source("a"), "b": lambda: source("b")}, asked, replies)
    assert replies.getvalue().splitlines() == [
        'round {"a": [0.0]}',
        'round {"a": [1.0]}',
        'round {"b": [0.0]}',
        'round {"a": [0.0]}',
    ]
    assert made == ["a", "b", "a"]


@pytest.fixture
def harness_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A harness in a process of its own: it prints more than answers, and one of its rows fails."""
    from benchmarks import child

    (tmp_path / "scripted_harness.py").write_text(
        "from benchmarks import harness\n"
        "def good():\n"
        "    while True:\n"
        "        print('a library says hello')\n"
        "        yield {'good': [1.0]}\n"
        "def bad():\n"
        "    raise RuntimeError('the pool is full')\n"
        "    yield\n"
        "harness.main({}, {'good': good, 'bad': bad})\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setitem(child.COMMANDS, "scripted", "scripted_harness")
    return "scripted"


def test_a_child_that_fails_says_why_and_the_next_row_has_a_new_one(harness_module: str) -> None:
    from benchmarks.child import Child, NotMeasuredError

    with Child(harness_module, Path(sys.executable)) as child:
        child.begin("good")
        assert child.round() == {"good": [1.0]}
        child.begin("bad")
        with pytest.raises(NotMeasuredError, match="scripted ended with 1: RuntimeError: the pool is full"):
            child.round()
        child.begin("good")
        assert child.round() == {"good": [1.0]}


def test_an_environment_that_is_not_there_names_the_command_that_makes_it(tmp_path: Path) -> None:
    from benchmarks.child import NotMeasuredError, make_child

    with (
        make_child("vLLM", tmp_path) as child,
        pytest.raises(NotMeasuredError, match=r"there is no .*vllm/bin/python: run 'make bench-peers'"),
    ):
        child.begin("warm")


def test_all_harnesses_send_the_same_prompts() -> None:
    from benchmarks.prompts import Prompts

    one, other = Prompts("churn"), Prompts("churn")
    heads = one.heads()
    assert heads == other.heads()
    served = one.served(heads, 20)
    assert served == other.served(heads, 20)
    assert all(len(tokens) == 2_000 for tokens in served)
    assert served[0][:1_000] == served[16][:1_000] != served[1][:1_000]
    assert len({tuple(tokens[1_000:]) for tokens in served}) == 20
    assert one.served(heads, 1)[0][:1_000] == heads[4]  # the turns go on
    assert Prompts("warm").draw(10) != Prompts("cold").draw(10)
