"""`pagedkv plan` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import one_sentence, run


def test_json_tells_bytes_blocks_and_requests_without_torch(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    fields = {"num_hidden_layers": 32, "num_key_value_heads": 8, "head_dim": 128, "torch_dtype": "float16"}
    config.write_text(json.dumps(fields))
    result = run("plan", str(config), "--memory", "40GiB", "--length", "10000", "--json", hide=("torch",))
    assert result.returncode == 0, result.stderr
    plan = json.loads(result.stdout)
    assert plan["kv_bytes"] == plan["request_bytes"] == 1_310_720_000
    assert (plan["bytes_per_token"], plan["num_blocks"], plan["concurrent_requests"]) == (131_072, 20_480, 32)
    assert plan["groups"][0]["page_shape"] == [16, 8, 128]


def test_tables_for_a_known_model_and_a_workload() -> None:
    options = ["--workload", "tree-of-thoughts", "--requests", "200", "--policy", "lfu,belady"]
    result = run("plan", "gpt-oss-20b", *options)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    for shown in ("128 tokens", "requests at a time", "tree-of-thoughts, seed 0: 200 requests", "99%", "lfu"):
        assert shown in result.stdout


def test_a_trace_tells_what_is_saved_against_lru(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    asked = [list(range(100 * (n % 3), 100 * (n % 3) + 64)) for n in range(12)]
    trace.write_text("".join(json.dumps({"token_ids": ids}) + "\n" for ids in asked))
    result = run("plan", "llama-3.1-8b", "--trace", str(trace), "--json")
    assert result.returncode == 0, result.stderr
    needs = json.loads(result.stdout)["trace"]["needs"]
    blocks = {(need["policy"], need["share"]): need["blocks"] for need in needs}
    assert blocks["lru", 0.99] == blocks["belady", 0.99] == 12
    assert all(need["gib"] == need["blocks"] * 16 * 131_072 / 2**30 for need in needs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-model"], "model: expected a config.json or one of"),
        (["llama-3.1-8b", "--memory", "1KiB"], "memory: expected at least"),
        (["llama-3.1-8b", "--dtype", "float7"], "dtype: expected one of"),
        (
            ["llama-3.1-8b", "--workload", "rag", "--requests", "9", "--policy", "best"],
            "policy: expected one of",
        ),
    ],
)
def test_what_is_wrong_is_one_sentence(arguments: list[str], message: str) -> None:
    assert message in one_sentence(run("plan", *arguments))
