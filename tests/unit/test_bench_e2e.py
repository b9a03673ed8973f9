"""The benchmark of requests: its rows, and what it asks of each engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("rich", reason="the benchmark's table needs the extra 'cli'")

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def source_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmarks are not part of the package."""
    monkeypatch.syspath_prepend(str(ROOT))


class Counting:
    """An engine that notes what it is asked, and takes a known time for it."""

    def __init__(self) -> None:
        self.prefix: list[int] = []
        self.prompts: list[list[int]] = []

    def remember(self, prefix: list[int]) -> None:
        self.prefix = prefix

    def first_token(self, prompt: list[int]) -> float:
        self.prompts.append(prompt)
        return 2.0 if self.prefix and prompt[: len(self.prefix)] == self.prefix else 50.0

    def step(self, prompts: list[list[int]]) -> float:
        self.prompts += prompts
        return float(len(prompts))


def test_every_row_is_one_of_our_harness_and_every_peer_has_a_command() -> None:
    from benchmarks.child import ENGINE_COMMANDS, ENVIRONMENTS
    from benchmarks.engine_table import HARNESS, ROWS
    from benchmarks.work import engine

    assert [row.name for row in ROWS] == list(engine.ROWS)
    for row in ROWS:
        assert row.harness == HARNESS
        assert set(row.peers) <= set(ENGINE_COMMANDS)
    for peer in ("vLLM, engine", "llama.cpp"):
        assert (ROOT / "benchmarks" / "peers" / f"{ENVIRONMENTS[peer]}.txt").exists()
    for module in ENGINE_COMMANDS.values():
        assert (ROOT / module.replace(".", "/")).with_suffix(".py").exists()


def test_peers_are_asked_for_prompts_that_are_new_but_for_the_prefix() -> None:
    from benchmarks.peers.engine_rows import rows
    from benchmarks.requests_table import NUM_COLD, NUM_NEW, NUM_SHARED

    made: list[Counting] = []

    def make() -> Counting:
        made.append(Counting())
        return made[-1]

    found: Any = rows("peer", make, batches=(1, 8), others={"peer, float32": make})
    assert next(found["warm"]()) == {"peer": [2.0] * 3}
    engine = made.pop()
    assert {len(prompt) for prompt in engine.prompts} == {NUM_SHARED + NUM_NEW}
    assert len({tuple(prompt[NUM_SHARED:]) for prompt in engine.prompts}) == len(engine.prompts) == 5 + 3
    assert next(found["cold"]()) == {"peer": [50.0]}
    assert len(made.pop().prompts[-1]) == NUM_COLD
    assert next(found["decode_1"]()) == {"peer": [1.0], "peer, float32": [1.0]}
    assert next(found["decode_8"]()) == {"peer": [8.0]}
    assert len({tuple(prompt) for prompt in made[-1].prompts}) == 2 * 8


def test_thread_time_of_calls_without_a_model_counts_one_prompt() -> None:
    from benchmarks.work.engine import NUM_AT_ONCE, Calls

    for calls in (Calls(), Calls(caching=False), Calls(salted=True)):
        assert 0 < calls.sample() < 1e6
        assert len(calls.running) == NUM_AT_ONCE
        assert calls.pool.stats().num_free_blocks < calls.pool.num_blocks


def test_a_command_line_without_turns_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks.e2e import parse

    assert parse([]).rounds == 3
    with pytest.raises(SystemExit):
        parse(["--rounds", "0"])
    assert "--rounds: expected at least 1, got 0" in capsys.readouterr().err
