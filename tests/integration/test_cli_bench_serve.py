"""`pagedkv bench serve`: chats from a file or made up, replayed when they are due."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import time
import urllib.request
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import pytest
from command import one_sentence, run
from tiny_folders import write_tiny_folder

from pagedkv.cli.chats import Chat, arrival_times, make_chats, read_chats
from pagedkv.cli.replay import Outcome, Replay, messages_before
from pagedkv.cli.replay_report import hit_rate
from pagedkv.errors import UsageError
from pagedkv.runner.engine import Engine
from pagedkv.runner.loader import LoadedModel, load_model

TEXT = "A page is the memory that holds a block. " * 3
SYSTEM = {"role": "system", "content": "You know all about pages. " * 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("tiny"), text=TEXT)


@pytest.fixture(scope="module")
def tiny(folder: Path) -> LoadedModel:
    return load_model(folder)


def ask(*questions: str) -> tuple[dict[str, str], ...]:
    return (SYSTEM, *({"role": "user", "content": question} for question in questions))


class Clock:
    """Moves a little at each look, and as far as somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 0.001
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def replayed(tiny: LoadedModel, chats: list[Chat], arrivals: list[float], **options: Any) -> Outcome:
    clock = Clock()
    assert tiny.tokenizer is not None
    engine = Engine(*tiny, num_blocks=options.pop("num_blocks", 128), clock=clock)
    replay = Replay(
        engine, tiny.tokenizer, chats, arrivals, max_tokens=4, clock=clock, sleep=clock.sleep, **options
    )
    return replay.run()


def test_no_request_starts_before_it_is_due(tiny: LoadedModel) -> None:
    chats = [Chat(ask("one", "two")), Chat(ask("three")), Chat(ask("four"))]
    outcome = replayed(tiny, chats, [0.0, 5.0, 2.0], think_s=9.0)
    assert len(outcome.served) == 4
    assert not outcome.refused
    for each in outcome.served:
        assert each.queue_s >= 0
        assert each.due_s < each.first_token_s <= each.end_s
    due = {(each.chat, each.turn): each for each in outcome.served}
    assert [due[0, 0].due_s, due[1, 0].due_s, due[2, 0].due_s] == [0.0, 5.0, 2.0]
    assert due[0, 1].due_s == pytest.approx(due[0, 0].end_s + 9.0)


def test_turns_of_a_chat_find_what_went_before(tiny: LoadedModel) -> None:
    outcome = replayed(tiny, [Chat(ask("one", "two", "three"))], [0.0])
    first, second, third = (each.request for each in outcome.served)
    assert first.num_cached_tokens == 0
    for earlier, later in pairwise((first, second, third)):
        # All full blocks, but for how the assistant's turn opens.
        assert later.num_cached_tokens >= (earlier.num_prompt_tokens - 3) // 16 * 16
    assert hit_rate(outcome.served) > 0.5


def test_chat_that_outgrows_the_model_ends_alone(tiny: LoadedModel) -> None:
    long = Chat(ask("page " * 2000))
    outcome = replayed(tiny, [long, Chat(ask("one"))], [0.0, 0.0])
    assert [each.chat for each in outcome.served] == [1]
    assert len(outcome.refused) == 1
    assert outcome.refused[0].startswith("chat 1, request 1: prompt: expected")


def test_salted_chats_share_nothing(tiny: LoadedModel) -> None:
    chats = [Chat(ask("one"), salt=salt) for salt in ("a", "b")]
    assert hit_rate(replayed(tiny, chats, [0.0, 3.0]).served) == 0


def test_answers_stand_between_questions_where_the_chat_has_none() -> None:
    said = messages_before(Chat(ask("one", "two", "three")), 1, ["first"])
    assert [message["content"] for message in said[1:]] == ["one", "first", "two"]
    own = ({"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}, *ask("r")[1:])
    said = messages_before(Chat(own), 1, ["not this"])
    assert [message["content"] for message in said] == ["q", "a", "r"]


def test_arrivals_have_the_rate_that_was_asked_for_and_repeat_with_the_seed() -> None:
    chats = [Chat(ask("one"))] * 4000
    times = arrival_times(chats, 8.0, seed=1)
    assert times[0] == 0
    assert times == sorted(times) == arrival_times(chats, 8.0, seed=1)
    assert times != arrival_times(chats, 8.0, seed=2)
    assert len(times) / times[-1] == pytest.approx(8, rel=0.1)
    assert set(arrival_times(chats, inf, seed=1)) == {0.0}


def test_made_chats_begin_alike_and_differ_in_their_questions() -> None:
    chats = make_chats(5, num_turns=2, num_system_words=50, num_question_words=6, seed=3)
    assert len({chat.messages[0]["content"] for chat in chats}) == 1
    assert len({chat.messages[1]["content"] for chat in chats}) == 5
    assert {chat.num_turns for chat in chats} == {2}


LINES = [
    {"messages": [*ask("one")], "timestamp": 12.5, "max_tokens": 3, "cache_salt": "a"},
    [*ask("two")],
    {"conversations": [{"from": "human", "value": "three"}, {"from": "gpt", "value": "3"}]},
]


def test_file_of_chats_may_be_ours_or_sharegpt_s(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text("\n".join(map(json.dumps, LINES)) + "\n\n")
    ours, plain, sharegpt = read_chats(file)
    assert ours == Chat(ask("one"), 12.5, 3, "a")
    assert plain == Chat(ask("two"))
    assert sharegpt.messages == ({"role": "user", "content": "three"}, {"role": "assistant", "content": "3"})


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{", "expected JSON"),
        ("{}", "expected an object with messages"),
        ('{"messages": [{"role": "user"}]}', "expected messages with a role and a content"),
        ('{"messages": [{"role": "system", "content": "x"}]}', "expected a message of the user"),
        ('{"messages": [{"role": "user", "content": "x"}], "timestamp": "now"}', "expected a timestamp"),
        ('{"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}', "expected max_tokens"),
        ('{"messages": [{"role": "user", "content": "x"}], "cache_salt": ""}', "expected a cache_salt"),
    ],
)
def test_line_that_is_no_chat_is_named(line: str, expected: str, tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps(LINES[1]) + "\n" + line + "\n")
    with pytest.raises(UsageError, match=rf"--chats: {expected}.*line 2"):
        read_chats(file)


def test_command_prints_draws_and_writes_what_was_served(folder: Path, tmp_path: Path) -> None:
    chats, picture, facts = tmp_path / "chats.jsonl", tmp_path / "serve.png", tmp_path / "serve.json"
    lines = [{"messages": [*ask(f"{i}", "more")], "timestamp": 100 + i / 50} for i in range(4)]
    chats.write_text("\n".join(map(json.dumps, lines)))
    result = run(
        *("bench", "serve", str(folder), "--chats", str(chats), "--timestamps", "--max-tokens", "3"),
        *("--output", str(picture), "--json", str(facts), "--threads", "1", "--metrics-port", "0"),
    )
    assert result.returncode == 0, result.stderr
    assert "8 requests in" in result.stdout
    assert "hit rate" in result.stdout
    assert "metrics: http://127.0.0.1:" in result.stderr
    assert struct.unpack(">II", picture.read_bytes()[16:24])[0] > 800
    found = json.loads(facts.read_text())
    assert len(found["requests"]) == 8
    assert 0.3 < found["summary"]["hit_rate"] < 1
    cached = sum(each["num_cached_tokens_by_source"]["device"] for each in found["requests"])
    prompt = sum(each["num_prompt_tokens"] for each in found["requests"])
    assert found["summary"]["hit_rate"] == pytest.approx(cached / prompt)
    off = run(
        *("bench", "serve", str(folder), "--num-chats", "2", "--turns", "1", "--system-words", "30"),
        *("--rate", "inf", "--max-tokens", "2", "--output", str(picture), "--no-prefix-caching"),
    )
    assert off.returncode == 0, off.stderr
    assert "hit rate 0.0%" in off.stdout


@pytest.mark.slow
def test_metrics_count_the_chats_and_nothing_before_them(folder: Path, tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    lines = [{"messages": [*ask("why")], "timestamp": at} for at in (0, 100_000)]  # one is far off
    chats.write_text("\n".join(map(json.dumps, lines)))
    arguments = ["--chats", str(chats), "--timestamps", "--max-tokens", "3", "--metrics-port", "0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "pagedkv", "bench", "serve", str(folder), *arguments],
        stderr=subprocess.PIPE,
        encoding="utf-8",
        cwd=tmp_path,
    )
    try:
        assert process.stderr is not None
        (url,) = {word for word in process.stderr.readline().split() if word.startswith("http://")}
        ended = 0.0
        give_up_s = time.monotonic() + 60
        while not ended and time.monotonic() < give_up_s:
            with urllib.request.urlopen(url, timeout=60) as answer:
                text = answer.read().decode()
            rows = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
            by_reason = {name: float(n) for name, n in rows.items() if "request_success_total" in name}
            ended = sum(by_reason.values())
        assert ended == 1, by_reason
        (aborted,) = (n for name, n in by_reason.items() if 'finished_reason="abort"' in name)
        assert aborted == 0
        (tokens,) = (n for name, n in rows.items() if "generation_tokens_total" in name)
        assert 1 <= float(tokens) <= 3
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--timestamps",), "--timestamps: expected --chats with it"),
        (("--rate", "0"), "--rate: expected more than 0"),
        (("--rate", "nan"), "--rate: expected more than 0"),
        (("--num-chats", "0"), "--num-chats: expected an integer from 1"),
        (("--chats", "nowhere.jsonl"), "--chats: expected a text file"),
        (("--output", "nowhere/x.png"), "--output: expected a file in a folder that exists"),
        (("--device", "tpu"), "device: expected 'cpu' or 'cuda', got 'tpu'"),
    ],
)
def test_what_a_user_gets_wrong_is_one_sentence(
    arguments: tuple[str, ...], expected: str, folder: Path, tmp_path: Path
) -> None:
    assert expected in one_sentence(run("bench", "serve", str(folder), *arguments))
