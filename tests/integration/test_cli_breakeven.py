"""`pagedkv breakeven` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import one_sentence, run


def test_the_formula_and_what_each_use_costs() -> None:
    result = run(
        "breakeven", "--price", "3", "--tokens", "10000", "--uses", "1,10", "--json", hide=("torch",)
    )
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    assert "(w − r) / (1 − r)" in answer["formula"]
    rows = {row["name"]: row for row in answer["rules"]}
    once, often = rows["anthropic-5m"]["by_uses"]
    assert once["with"] == pytest.approx(0.03 * 1.25)
    assert often["saved"] == pytest.approx(0.3 - 0.03 * (1.25 + 0.9))
    assert [rows[name]["first_use_that_pays"] for name in rows] == [2, 3, 2]
    table = run("breakeven").stdout
    assert "pays above N = (w − r) / (1 − r)" in table
    assert "N = 3" in table


def test_own_rules_on_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [{"token_ids": list(range(64)), "time_s": 100 * n} for n in range(3)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ["--write", "2", "--read", "0.5", "--ttl", "150", "--price", "1e6"]
    answer = json.loads(run("breakeven", str(trace), *options, "--json").stdout)
    bills = {bill["rules"]: bill for bill in answer["trace"]["bills"]}
    assert bills["own"]["with"] == 64 * 2 + 2 * 32
    assert bills["own"]["saved_read_again"] == 0
    assert bills["anthropic-5m"]["read_tokens"] == 0  # 1,024 tokens at least
    shown = run("breakeven", str(trace), *options)
    assert "trace.jsonl: 3 requests, 192 tokens" in shown.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--provider", "acme"], "--provider: expected some of anthropic-5m"),
        (["--write", "2"], "--write, --read: expected both or none"),
        (["--write", "-1", "--read", "0"], "write: expected a finite number"),
        (["--uses", "0"], "--uses: expected integers of at least 1"),
        (["--tokens", "0"], "--tokens, --price: expected at least 1"),
    ],
)
def test_what_is_wrong_is_one_sentence(options: list[str], message: str) -> None:
    assert message in one_sentence(run("breakeven", *options))
