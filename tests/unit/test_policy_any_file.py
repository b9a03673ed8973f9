"""Whatever a file holds, it is read, or named as wrong: no other error, and nothing half."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagedkv import UsageError
from pagedkv.policy import read_traces, simulate
from pagedkv.policy.text import WordTokenizer
from pagedkv.prompts import lint_prompts, read_log

NAMES = (
    "hash_ids", "timestamp", "input_length", "output_length", "chat_id", "requests", "block_size", "id", "t",
    "in", "out", "hash_id_scope", "token_ids", "time_s", "cache_salt", "prompt", "messages", "conversations",
    "role", "content", "from", "value", "tools", "system", "text", "tool_calls",
)  # fmt: skip
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 40), st.integers(), st.floats(), st.text(max_size=9),
    st.sampled_from(["user", "assistant", "human", "gpt"]),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(st.integers(0, 5), max_size=40),
        st.dictionaries(st.sampled_from(NAMES), inner, max_size=6),
    ),
    max_leaves=12,
)
# Lines that are nearly right: one field of a good line is something else.
GOOD = [
    {"timestamp": 0, "input_length": 40, "output_length": 1, "hash_ids": [1, 2, 3]},
    {"token_ids": [1, 2, 3], "time_s": 1, "cache_salt": "a", "output_length": 3},
    {"id": "s", "block_size": 16, "requests": [{"t": 0, "in": 20, "out": 1, "hash_ids": [1, 2]}]},
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}], "system": "s"},
    {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]},
    {"prompt": "a text", "timestamp": 5},
]
NEARLY = st.builds(
    lambda good, name, value: {**good, name: value}, st.sampled_from(GOOD), st.sampled_from(NAMES), VALUES
)
LINES = st.lists(
    st.one_of(
        st.one_of(NEARLY, VALUES).map(json.dumps).map(str.encode),
        st.binary(max_size=20).map(lambda data: data.replace(b"\n", b"")),
    ),
    max_size=4,
)
SAME_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def write(folder: Path, lines: list[bytes]) -> Path:
    file = folder / "any.jsonl"
    file.write_bytes(b"\n".join(lines))
    return file


@SAME_FOLDER
@given(lines=LINES)
def test_any_trace_is_read_or_refused(lines: list[bytes], tmp_path: Path) -> None:
    file = write(tmp_path, lines)
    try:
        trace = read_traces([file])
    except UsageError:
        return
    for request in trace.requests:
        assert 0 < request.num_tokens <= request.num_replayed_tokens(16)
    if trace.num_tokens < 100_000:
        for result in simulate(trace, policies=["lru", "belady", "infinite"], blocks=[5], block_size=16):
            assert 0 <= result.block_hit_rate <= 1
    if trace.problems:
        with pytest.raises(UsageError):
            read_traces([file], strict=True)


@SAME_FOLDER
@given(lines=LINES)
def test_any_log_is_read_or_refused(lines: list[bytes], tmp_path: Path) -> None:
    file = write(tmp_path, lines)
    words = WordTokenizer()
    try:
        prompts, problems = read_log([file], words)
    except UsageError:
        return
    if not any(prompt.is_ids for prompt in prompts):
        report = lint_prompts(prompts, words)
        assert report.reused_tokens + report.lost_tokens <= report.num_tokens
    numbered: list[Any] = [problem.where for problem in problems]
    assert len(set(numbered)) == len(numbered)


def test_what_gzip_made_is_known_by_its_content(tmp_path: Path) -> None:
    line = b'{"token_ids": [1, 2, 3]}\n'
    (tmp_path / "packed.jsonl").write_bytes(gzip.compress(line))
    (tmp_path / "plain.jsonl.gz").write_bytes(line)
    for name in ("packed.jsonl", "plain.jsonl.gz"):
        assert read_traces([tmp_path / name]).num_tokens == 3
