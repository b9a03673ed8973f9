"""An answer's text can be forked at any token, and each fork goes on as if it were alone."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from hypothesis import given
from hypothesis import strategies as st

from pagedkv.runner.answer_text import AnswerText
from pagedkv.runner.detokenizer import TextStream

# Characters of one to four bytes, cut anywhere.
BYTES = st.text("ab€😀", max_size=6).map(str.encode)
STOPS = st.lists(st.text("ab€", min_size=1, max_size=3), max_size=2)


def begin(stops: list[str]) -> AnswerText:
    return AnswerText(TextStream(lambda tokens: bytes(tokens).decode(errors="replace")), stops)


def feed(text: AnswerText, tokens: bytes) -> str:
    return "".join(map(text.put, tokens))


@given(BYTES, BYTES, BYTES, STOPS, st.integers(0, 3))
def test_forks_go_on_by_themselves(
    before: bytes, ours: bytes, theirs: bytes, stops: list[str], cut: int
) -> None:
    before, ours = before[: len(before) - cut], before[max(0, len(before) - cut) :] + ours
    text = begin(stops)
    shown = feed(text, before)
    fork = text.fork()
    for each, tokens in ((text, ours), (fork, theirs)):
        alone = begin(stops)
        expected = feed(alone, before + tokens) + alone.flush()
        assert shown + feed(each, tokens) + each.flush() == expected
        assert each.stopped_by == alone.stopped_by


def test_without_a_tokenizer_there_is_no_text() -> None:
    text = AnswerText(None, ())
    assert (text.put(5), text.fork().put(6), text.flush(), text.stopped_by) == ("", "", "", None)
