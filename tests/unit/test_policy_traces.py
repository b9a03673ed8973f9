"""Traces are read by what they say of themselves; what is wrong is named, and left out whole."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedkv import UsageError
from pagedkv.policy import Trace, read_traces
from pagedkv.policy.text import WordTokenizer


def write(folder: Path, *lines: Any, name: str = "trace.jsonl") -> Path:
    file = folder / name
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return file


def mooncake(time_ms: float, length: int, ids: list[int], **more: Any) -> dict[str, Any]:
    return {"timestamp": time_ms, "input_length": length, "output_length": 5, "hash_ids": ids, **more}


def prompts(trace: Trace, block_size: int = 16) -> list[list[int]]:
    return [request.replayed_tokens(block_size).tolist() for request in trace.requests]


def test_equal_block_names_are_equal_tokens_and_different_ones_share_none(tmp_path: Path) -> None:
    lines = mooncake(0, 1000, [7, 8]), mooncake(1500, 1100, [7, 8, 9]), mooncake(1500, 512, [2**70])
    trace = read_traces([write(tmp_path, *lines)])
    a, b, c = prompts(trace, 512)
    assert a == b[:1024]
    assert len(set(a) | set(b[1024:]) | set(c)) == 4 * 512
    assert [request.time_s for request in trace.requests] == [0, 1.5, 1.5]
    assert [request.num_tokens for request in trace.requests] == [1000, 1100, 512]
    assert trace.natural_block_size == 512
    assert trace.num_blocks(512) == 6
    assert trace.num_blocks(16) == 63 + 69 + 32
    # In smaller blocks a prompt ends with the block that holds its last token.
    assert [len(prompt) for prompt in prompts(trace, 16)] == [1008, 1104, 512]


def test_names_belong_to_their_file(tmp_path: Path) -> None:
    files = [write(tmp_path, mooncake(0, 512, [0]), name=f"{i}.jsonl") for i in range(2)]
    assert len(np.intersect1d(*prompts(read_traces(files)))) == 0


@pytest.mark.parametrize("size", [16, 64, 512, 1024])
def test_the_block_size_of_hash_ids_follows_from_the_lengths(size: int, tmp_path: Path) -> None:
    lines = [mooncake(n, length, list(range(-(-length // size)))) for n, length in enumerate((5000, 777, 9))]
    assert read_traces([write(tmp_path, *lines)]).natural_block_size == size


def test_a_trace_with_chats_in_it_counts_seconds(tmp_path: Path) -> None:
    line = {"chat_id": 1, "parent_chat_id": -1, "turn": 1, "type": "text", **mooncake(61.5, 20, [1, 2])}
    assert read_traces([write(tmp_path, line)]).requests[0].time_s == 61.5


def test_a_session_keeps_its_names_and_shares_no_tail(tmp_path: Path) -> None:
    requests = [
        {"t": 0.0, "in": 130, "out": 7, "hash_ids": [1, 2]},
        {"t": 4.5, "in": 200, "out": 9, "hash_ids": [1, 2, 3]},
    ]
    session = {"id": "s", "block_size": 64, "hash_id_scope": "local", "requests": requests}
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text(json.dumps(session, indent=1))
    trace = read_traces([tmp_path])
    assert [request.time_s for request in trace.requests] == [0, 0, 4.5, 4.5]
    first_a, first_b, second_a, second_b = prompts(trace, 64)
    assert len(first_a) == 192
    assert first_a[:128] == second_a[:128]
    assert not set(first_a[128:]) & set(second_a)
    assert not set(second_a) & (set(first_b) | set(second_b))


def test_token_ids_salts_and_times_are_taken_as_they_are(tmp_path: Path) -> None:
    late = {"token_ids": [5, 2**32 - 1], "time_s": 2, "cache_salt": "é", "output_length": 3}
    early = {"prompt": [1, 2, 3], "timestamp": 1500}
    trace = read_traces([write(tmp_path, late, early)])
    assert prompts(trace) == [[1, 2, 3], [5, 2**32 - 1]]
    assert [request.time_s for request in trace.requests] == [1.5, 2]
    assert [request.cache_salt for request in trace.requests] == [None, "é"]
    assert [request.num_output_tokens for request in trace.requests] == [0, 3]


@pytest.mark.parametrize("form", ["sharegpt", "messages"])
def test_each_answer_of_a_chat_is_a_request_that_holds_all_before_it(form: str, tmp_path: Path) -> None:
    said = ["Hello there", "Hi. What now?", "Tell me more", "Certainly, more", "Thanks", "Bye"]
    if form == "sharegpt":
        turns = [{"from": ("human", "gpt")[n % 2], "value": text} for n, text in enumerate(said)]
        file = tmp_path / "chats.json"
        file.write_text(json.dumps([{"id": "x", "conversations": turns}], indent=2))
    else:
        turns = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(said)]
        turns[2]["content"] = [{"type": "text", "text": said[2]}]  # type: ignore[assignment]
        file = write(tmp_path, {"messages": turns})
    words = WordTokenizer()
    trace = read_traces([file], encode=words.encode)
    first, second, third = prompts(trace)
    assert second[: len(first)] == first
    assert third[: len(second)] == second
    assert "Hi. What now?" not in words.decode(first)
    assert all(text in words.decode(third) for text in said[:5])
    times = [request.time_s for request in trace.requests]
    assert times == sorted(set(times))
    assert [request.num_output_tokens > 0 for request in trace.requests] == [True, True, True]


def test_a_request_as_it_was_sent_is_one_whatever_its_history(tmp_path: Path) -> None:
    said = [{"role": ("user", "assistant")[n % 2], "content": f"words {n}"} for n in range(3)]
    words = WordTokenizer()
    body = {"system": "be good", "tools": [{"name": "f"}], "messages": said, "time_s": 4}
    trace = read_traces([write(tmp_path, body)], encode=words.encode)
    [prompt] = prompts(trace)
    shown = words.decode(prompt)
    places = [shown.index(text) for text in ('"name": "f"', "be good", "words 0", "words 1", "words 2")]
    assert places == sorted(places)
    assert trace.requests[0].time_s == 4


def test_a_question_without_answer_ends_a_chat_of_a_data_set(tmp_path: Path) -> None:
    turns = [{"from": ("human", "gpt")[n % 2], "value": f"words {n}"} for n in range(3)]
    trace = read_traces([write(tmp_path, {"conversations": turns})])
    assert [request.num_output_tokens > 0 for request in trace.requests] == [True, False]


def test_packed_files_are_read(tmp_path: Path) -> None:
    plain = write(tmp_path, {"token_ids": [1, 2]})
    packed = tmp_path / "trace.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert prompts(read_traces([packed])) == prompts(read_traces([plain]))


GOOD = {"token_ids": [1, 2, 3]}
BAD: dict[str, Any] = {
    "no JSON": "{'token_ids': [1]}",
    "half a line": '{"token_ids": [1, 2',
    "a list": "[1, 2]",
    "no known field": {"tokens": [1]},
    "no tokens": {"token_ids": []},
    "a text among them": {"token_ids": [1, "2"]},
    "a negative token": {"token_ids": [1, -2]},
    "a fraction": {"token_ids": [1.5]},
    "too large a token": {"token_ids": [2**32]},
    "no time": {"token_ids": [1], "time_s": None},
    "NaN": '{"token_ids": [1], "time_s": NaN}',
    "milliseconds for seconds": {"token_ids": [1], "time_s": 1_790_000_000_000},
    "an empty salt": {"token_ids": [1], "cache_salt": ""},
    "a salt that is none": {"token_ids": [1], "cache_salt": 5},
    "a negative answer": {"token_ids": [1], "output_length": -1},
    "too few ids": mooncake(0, 5000, [1, 2, 3, 4, 5, 6, 7]),
    "no length": {"timestamp": 0, "hash_ids": [1]},
    "a length of nothing": mooncake(0, 0, []),
    "a truth for an id": mooncake(0, 10, [True]),
    "a message without text": {"messages": [{"role": "user"}, {"role": "user", "content": 5}]},
    "no messages": {"conversations": []},
    "requests that are none": {"requests": 5, "block_size": 64},
    "a request that is none": {"requests": [5], "block_size": 64},
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_a_bad_line_is_named_and_left_out_or_refused(bad: Any, tmp_path: Path) -> None:
    file = write(tmp_path, GOOD, "", bad, {"token_ids": [4]})
    trace = read_traces([file])
    assert prompts(trace) == [[1, 2, 3], [4]]
    [problem] = trace.problems
    assert problem.where.startswith(f"{file}, line 3")
    assert "expected" in problem.why
    with pytest.raises(UsageError, match="line 3"):
        read_traces([file], strict=True)


def test_a_bad_element_of_a_list_is_named(tmp_path: Path) -> None:
    file = tmp_path / "list.json"
    file.write_text(json.dumps([GOOD, {"conversations": 7}, GOOD]))
    [problem] = read_traces([file]).problems
    assert problem.where == f"{file}, element 2"


def test_bytes_that_are_no_text_are_a_bad_line(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_bytes(b'{"token_ids": [1]}\n\xff\xfe\n{"prompt": "\xff"}\n')
    assert [problem.where[-6:] for problem in read_traces([file]).problems] == ["line 2", "line 3"]


@pytest.mark.parametrize("content", ["", "\n\n", "no JSON\n", "[]", "{}"])
def test_a_file_without_a_request_is_refused(content: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(content)
    with pytest.raises(UsageError, match="expected a request"):
        read_traces([file])


@pytest.mark.parametrize("content", [b"", b"\x1f\x8b", b"no gzip", gzip.compress(b"{}" * 99)[:-9]])
def test_a_broken_packed_file_is_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl.gz"
    file.write_bytes(content)
    with pytest.raises(UsageError, match="expected a"):
        read_traces([file])


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="expected a readable file"):
        read_traces([tmp_path / "none.jsonl"])
