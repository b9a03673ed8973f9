"""What loses reuse in a log is found, named, and counted to the token."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkv import UsageError
from pagedkv.policy.text import WordTokenizer
from pagedkv.prompts import LintReport, LoggedPrompt, lint_prompts, read_log
from pagedkv.prompts.causes import CAUSES
from pagedkv.prompts.differences import WINDOW, find_gaps

RULES = " ".join(
    f"Rule {i}: answer a question of kind {chr(97 + i % 26)} by document {i * 7}." for i in range(40)
)
NUM_PROMPTS = 8


def lint(texts: list[str], salts: list[str | None] | None = None) -> LintReport:
    words = WordTokenizer()
    chosen = salts or [None] * len(texts)
    return lint_prompts(
        [
            LoggedPrompt(f"line {n}", np.array(words.encode(text), np.uint32), salt)
            for n, (text, salt) in enumerate(zip(texts, chosen, strict=True), 1)
        ],
        words,
    )


def question(n: int) -> str:
    return f"{random.Random(n).random()} is what?"


def uuid(n: int) -> str:
    digits = f"{random.Random(n).getrandbits(128):032x}"
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def tools(n: int) -> str:
    fields = {f"key_{i}": {"type": "string", "text": f"the value of {i}"} for i in range(12)}
    names = list(fields)
    random.Random(n).shuffle(names)
    return json.dumps({name: fields[name] for name in names})


BLANKS = (" ", "  ", "\n", "\n\n", "\t", " \n", "\n ", "   ")
NAMES = ("Ann", "Bob", "Cid", "Dora", "Eve", "Finn", "Gus", "Hal")
PLACES = {
    "ISO time": ("timestamp", lambda n: f"Now: 2026-11-{n + 1:02}T1{n}:0{n}:59Z."),
    "date in words": ("timestamp", lambda n: f"It is {('Mon', 'Fri')[n % 2]}day, November {n + 2}, 2026."),
    "clock": ("timestamp", lambda n: f"It is 1{n}:3{n}."),
    "seconds since 1970": ("timestamp", lambda n: f"now={1_790_000_000 + 977 * n}"),
    "UUID": ("id", lambda n: f"Session {uuid(n)}."),
    "prefixed id": ("id", lambda n: f"Request req_{uuid(n)[:8]}x{n}."),
    "counter": ("number", lambda n: f"Turn {n} of many."),
    "keys": ("JSON key order", tools),
    "blanks": ("whitespace", lambda n: f"Follow{BLANKS[n]}these"),
    "case": ("letter case or Unicode form", lambda n: "".join(
        letter.upper() if n >> i & 1 else letter for i, letter in enumerate("abc")) + " rules"),
    "name": ("dynamic text ahead of static", lambda n: f"Help {NAMES[n]}."),
}  # fmt: skip


@pytest.mark.parametrize("kind", PLACES)
def test_what_differs_ahead_of_static_text_is_named_and_its_loss_counted(kind: str) -> None:
    cause, make = PLACES[kind]
    texts = [f"You are an assistant.\n{make(n)}\n{RULES}\n{question(n)}" for n in range(NUM_PROMPTS)]
    report = lint(texts)
    top = report.findings[0]
    assert top.cause == cause
    assert top.advice == CAUSES[cause]
    rules = len(WordTokenizer().encode(RULES))
    assert top.lost_tokens >= 0.9 * rules * top.num_prompts
    assert top.num_prompts >= NUM_PROMPTS - 2  # the case of three letters, and blanks, may come twice
    assert sum(f.lost_tokens for f in report.findings if f.cause == cause) >= 0.95 * report.lost_tokens
    assert report.reused_tokens + report.lost_tokens <= report.num_tokens
    # Without the difference nothing is lost.
    assert lint([f"You are an assistant.\n{RULES}\n{question(n)}" for n in range(NUM_PROMPTS)]).findings == []


def test_the_first_token_that_differs_is_told_in_its_context() -> None:
    report = lint([f"You are an assistant for {who} today. {RULES}" for who in ("Ann", "Bob")])
    [finding] = report.findings
    assert finding.before.endswith("assistant for")
    assert (finding.old, finding.new) == (" Ann", " Bob")
    assert (finding.old_token, finding.new_token) == (" Ann", " Bob")
    assert finding.position == len(WordTokenizer().encode("You are an assistant for"))
    assert (finding.where, finding.against) == ("line 2", "line 1")
    assert finding.lost_tokens == len(WordTokenizer().encode(f" today. {RULES}"))
    assert report.lost_tokens == finding.lost_tokens


def test_documents_in_another_order_are_told_as_such() -> None:
    documents = [" ".join(f"document {d} says {w} of {d * w}" for w in range(40)) for d in range(4)]
    texts = []
    for n in range(NUM_PROMPTS):
        random.Random(n).shuffle(documents)
        texts.append("Use these.\n" + "\n".join(documents) + f"\n{question(n)}")
    report = lint(texts)
    assert {finding.cause for finding in report.findings} == {"reordered text"}
    assert report.lost_tokens > 0.2 * report.num_tokens


def test_findings_come_by_what_they_lost() -> None:
    texts = [
        f"id {uuid(n)}\nshort static text of a dozen words or so in all it is\nat 12:0{n}:00\n{RULES}"
        for n in range(5)
    ]
    report = lint(texts)
    assert [finding.cause for finding in report.findings] == ["timestamp", "id"]
    lost = [finding.lost_tokens for finding in report.findings]
    assert lost == sorted(lost, reverse=True)
    assert sum(lost) == report.lost_tokens


def test_a_chat_that_grows_loses_nothing() -> None:
    said = [f"{RULES} {n}" for n in range(5)]
    assert lint(["\n".join(said[: n + 1]) for n in range(5)]).findings == []


def test_prompts_of_two_tenants_are_not_compared() -> None:
    texts = [f"Session {uuid(n)}. {RULES}" for n in range(2)]
    assert lint(texts, ["a", "b"]).findings == []
    assert lint(texts, ["a", "a"]).findings != []


TOKENS = st.lists(st.integers(0, 60), max_size=90)


@given(TOKENS, TOKENS, TOKENS, TOKENS, TOKENS)
def test_gaps_and_runs_rebuild_both_prompts(
    head: list[int], tail: list[int], a: list[int], b: list[int], middle: list[int]
) -> None:
    old = np.array([*head, *a, *middle, *b, *tail], np.uint32)
    new = np.array([*head, *b, *middle, *a, *tail], np.uint32)
    gaps = find_gaps(old, new)
    if not gaps:
        assert old.tolist() == new.tolist()
        return
    first = gaps[0]
    assert old[: first.old_begin].tolist() == new[: first.begin].tolist()
    old_at, at = first.old_begin, first.begin
    for gap in gaps:
        assert (gap.old_begin, gap.begin) == (old_at, at)
        assert gap.old_end > gap.old_begin or gap.end > gap.begin
        run = slice(gap.end, gap.end + gap.common)
        assert old[gap.old_end : gap.old_end + gap.common].tolist() == new[run].tolist()
        assert gap.common == 0 or gap.common >= WINDOW
        old_at, at = gap.old_end + gap.common, gap.end + gap.common
    assert (old_at, at) == (len(old), len(new))


def test_long_text_in_common_behind_a_difference_is_always_found() -> None:
    shared = np.arange(1000, dtype=np.uint32)
    old, new = (np.concatenate((np.array(own, np.uint32), shared)) for own in ([5, 6], [7]))
    [gap] = find_gaps(old, new)
    assert (gap.old_begin, gap.old_end, gap.begin, gap.end, gap.common) == (0, 2, 0, 1, 1000)


# ---------------------------------------------------------------------- logs


def write(folder: Path, *lines: Any) -> Path:
    file = folder / "log.jsonl"
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return file


def test_calls_of_tools_and_pictures_are_part_of_a_prompt(tmp_path: Path) -> None:
    words = WordTokenizer()
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "look"}, {"type": "image", "source": "pic"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "search"}}]},
        {"role": "user", "content": [{"type": "tool_result", "content": "found it"}]},
    ]
    [prompt], problems = read_log([write(tmp_path, {"messages": messages})], words)
    assert problems == []
    shown = words.decode(prompt.tokens.tolist())
    places = [shown.index(part) for part in ("look", "pic", '"name": "search"', "found it")]
    assert places == sorted(places)


def test_every_form_of_a_prompt_is_read(tmp_path: Path) -> None:
    words = WordTokenizer()
    file = write(
        tmp_path,
        {"prompt": "a text"},
        {"text": "a text", "cache_salt": "t"},
        '"a text"',
        {"token_ids": [1, 2, 3]},
        {"tools": [{"name": "f"}], "system": [{"type": "text", "text": "be good"}],
         "messages": [{"role": "user", "content": "hi"}]},
    )  # fmt: skip
    prompts, problems = read_log([file], words)
    assert problems == []
    assert {tuple(prompt.tokens) for prompt in prompts[:3]} == {tuple(words.encode("a text"))}
    assert [prompt.cache_salt for prompt in prompts] == [None, "t", None, None, None]
    assert [prompt.is_ids for prompt in prompts] == [False, False, False, True, False]
    rendered = words.decode(prompts[4].tokens.tolist())
    assert rendered.index('"name": "f"') < rendered.index("be good") < rendered.index("hi")


@pytest.mark.parametrize(
    "bad", ["{", "7", {"prompt": 5}, {"prompt": ""}, {"token_ids": [-1]}, {"token_ids": []},
            {"messages": [5]}, {"other": 1}, {"prompt": "x", "cache_salt": ""}],
)  # fmt: skip
def test_a_bad_line_is_named_and_left_out_or_refused(bad: Any, tmp_path: Path) -> None:
    file = write(tmp_path, {"prompt": "one"}, bad, {"prompt": "two"})
    prompts, [problem] = read_log([file], WordTokenizer())
    assert len(prompts) == 2
    assert problem.where == f"{file}, line 2"
    with pytest.raises(UsageError, match="line 2"):
        read_log([file], WordTokenizer(), strict=True)
    with pytest.raises(UsageError, match="expected a prompt"):
        read_log([write(tmp_path, bad)], WordTokenizer())
