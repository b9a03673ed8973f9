"""`pagedkv simulate` as a user runs it."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from command import one_sentence, run


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two documents that are asked about in turn, which a pool of 5 blocks can't hold together."""
    file = tmp_path / "trace.jsonl"
    lines = [
        {
            "timestamp": 1000 * n,
            "input_length": 1700,
            "output_length": 9,
            "hash_ids": [n % 2, 2 + n % 2, 4 + n % 2, 9 + n],
        }
        for n in range(10)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_json_has_a_result_for_each_policy_and_size(trace: Path) -> None:
    result = run("simulate", str(trace), "--policy", "lru,belady,infinite", "--blocks", "5,10", "--json")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    answer = json.loads(result.stdout)
    rates = {
        (r["policy"], r["blocks"]): (r["block_hit_rate"], r["token_hit_rate"]) for r in answer["results"]
    }
    # Of the other document LRU keeps the first block.
    assert rates["lru", 5] == (8 / 40, 8 * 512 / 17_000)
    # Eight of the ten requests find three of their four blocks.
    all_there = (24 / 40, 8 * 3 * 512 / 17_000)
    assert rates["lru", 10] == rates["belady", 10] == rates["infinite", 16] == all_there
    assert rates["belady", 5] == rates["lru", 5]
    assert len(rates) == 5


def test_without_torch_it_works_and_without_sizes_it_finds_some(trace: Path) -> None:
    result = run("simulate", str(trace), "--csv", hide=("torch",))
    assert result.returncode == 0, result.stderr
    rows = list(csv.DictReader(io.StringIO(result.stdout)))
    assert {row["policy"] for row in rows} == {"lru", "belady", "infinite"}
    assert float(rows[-1]["block_hit_rate"]) == 24 / 40


def test_a_table_and_two_pictures(trace: Path, tmp_path: Path) -> None:
    size, time = tmp_path / "size.png", tmp_path / "time.png"
    result = run("simulate", str(trace), "--blocks", "5,10", "--plot", str(size), "--time-plot", str(time))
    assert result.returncode == 0, result.stderr
    assert "10 requests, 17,000 tokens, 40 blocks of 512" in result.stdout
    assert "60.0%" in result.stdout
    assert size.read_bytes()[:4] == time.read_bytes()[:4] == b"\x89PNG"


def test_a_bad_line_is_told_and_left_out_or_refused(trace: Path) -> None:
    with trace.open("a") as file:
        file.write('{"timestamp": 5, "input_length": 17\n')
    kept = run("simulate", str(trace), "--policy", "lru", "--blocks", "10", "--json")
    assert json.loads(kept.stdout)["results"][0]["requests"] == 10
    assert f"{trace}, line 11" in kept.stderr
    assert f"{trace}, line 11" in one_sentence(run("simulate", str(trace), "--strict"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--blocks", "x"], "--blocks: expected integers"),
        (["--blocks", "0"], "--blocks: expected integers of at least 1"),
        (["--policy", ","], "--policy: expected at least one"),
        (["--policy", "lru,clairvoyant"], "policy: expected one of lru, "),
        (["--model", "no-such-model"], "model: expected a config.json or one of smollm2-135m, "),
        (["--tflops", "0"], "--tflops: expected more than 0"),
        (["--memory", "1GiB", "--blocks", "5"], "--blocks, --memory: expected one of them"),
        (["--memory", "lots"], "memory: expected bytes or a size"),
        (["--memory", "1GiB,1KiB"], "--memory: expected room for a block of"),
        (["--block-size", "0"], "block_size: expected an integer from 1"),
        (["--json", "--csv"], "--json, --csv: expected one of them"),
        (["--plot", "/no/such/folder/x.png"], "--plot: expected a file in a folder that exists"),
        (["--hash-block-size", "0"], "--hash-block-size: expected at least 1"),
    ],
)
def test_what_is_wrong_is_one_sentence(options: list[str], message: str, trace: Path) -> None:
    assert message in one_sentence(run("simulate", str(trace), *options))


def test_a_workload_takes_the_place_of_traces(trace: Path) -> None:
    options = ["--workload", "rag", "--requests", "50", "--seed", "3", "--blocks", "500", "--json"]
    answer = json.loads(run("simulate", *options).stdout)
    assert list(answer) == ["results"]
    assert {result["trace"] for result in answer["results"]} == {"rag, seed 3"}
    assert {result["requests"] for result in answer["results"]} == {50}
    assert "got both" in one_sentence(run("simulate", str(trace), *options))
    assert "got neither" in one_sentence(run("simulate"))
