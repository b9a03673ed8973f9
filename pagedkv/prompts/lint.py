"""Why prompts of a log find less than they could: where they part from earlier ones, and what follows alike.

Every prompt is compared with the earlier one that it is most like. Behind a difference, tokens that
both have are lost: they were cached, and could not be found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from pagedkv.policy.trace import Problem
from pagedkv.pool import BlockPool
from pagedkv.prompts.causes import CAUSES, Span, find_cause
from pagedkv.prompts.differences import WINDOW, Gap, Tokens, Windows, find_gaps, windows_of

BLOCK = 16
SAMPLE = 4
"""One window in so many, chosen by its hash, says which prompts are alike."""
KEPT_OF_A_WINDOW = 4
CONTEXT = 60
SHOWN = 80


class Tokenizer(Protocol):
    """What turns text into token ids and back."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of ids."""


class LoggedPrompt(NamedTuple):
    """A prompt of a log, and where it stands; prompts with different salts share nothing.

    `is_ids`: the log gave token ids, not a text.
    """

    where: str
    tokens: Tokens
    cache_salt: str | None = None
    is_ids: bool = False


@dataclass
class Finding:
    """A place in prompts where reuse is lost.

    Attributes
    ----------
    cause : str
        One of `CAUSES`.
    advice : str
    lost_tokens : int
        Tokens behind it that were cached and not found, over the log.
    num_prompts : int
        Prompts that lost some.
    before : str
        Text ahead of it, of the first of these.
    old, new : str
        What an earlier prompt has there, and what the prompt has.
    old_token, new_token : str
        The first token that differs, decoded; empty where a prompt ends.
    position : int
        Of that token in the prompt.
    where, against : str
        The prompt and the earlier one.
    """

    cause: str
    advice: str
    lost_tokens: int
    num_prompts: int
    before: str
    old: str
    new: str
    old_token: str
    new_token: str
    position: int
    where: str
    against: str


@dataclass
class LintReport:
    """What a log's prompts found of each other, and what they lost.

    Attributes
    ----------
    num_prompts, num_tokens : int
    reused_tokens : int
        Leading tokens that some earlier prompt has.
    lost_tokens : int
        The sum over the findings.
    findings : list of Finding
        The most lost tokens first.
    problems : list of Problem
        Lines that were left out.
    """

    num_prompts: int
    num_tokens: int
    reused_tokens: int
    lost_tokens: int
    findings: list[Finding]
    problems: list[Problem] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return the report, for JSON."""
        return {
            **vars(self),
            "findings": [vars(finding) for finding in self.findings],
            "problems": [problem._asdict() for problem in self.problems],
        }


def lint_prompts(
    prompts: Iterable[LoggedPrompt],
    tokenizer: Tokenizer,
    *,
    progress: Callable[[int], None] | None = None,
) -> LintReport:
    """Compare every prompt with those before it.

    Parameters
    ----------
    prompts : iterable of LoggedPrompt
        In the order of the log.
    tokenizer : Tokenizer
        That made their tokens.
    progress : callable, optional
        Called with 1 after each prompt.
    """
    log = [prompt for prompt in prompts if len(prompt.tokens)]
    num_blocks = sum(-(-len(prompt.tokens) // BLOCK) for prompt in log)
    linter = _Linter(tokenizer, BlockPool(max(1, num_blocks), block_size=BLOCK, clock="manual"))
    for prompt in log:
        linter.add(prompt)
        if progress is not None:
            progress(1)
    findings = sorted(linter.findings.values(), key=lambda finding: -finding.lost_tokens)
    return LintReport(
        num_prompts=len(log),
        num_tokens=sum(len(prompt.tokens) for prompt in log),
        reused_tokens=linter.reused_tokens,
        lost_tokens=sum(finding.lost_tokens for finding in findings),
        findings=findings,
    )


class _Linter:
    def __init__(self, tokenizer: Tokenizer, pool: BlockPool) -> None:
        self._tokenizer = tokenizer
        self._pool = pool
        self._log: list[LoggedPrompt] = []
        self._having: dict[tuple[str | None, int], list[int]] = {}  # a sampled window: the last that have it
        self.findings: dict[tuple[str, str], Finding] = {}
        self.reused_tokens = 0

    def add(self, prompt: LoggedPrompt) -> None:
        found = self._pool.match(prompt.tokens, cache_salt=prompt.cache_salt).num_tokens
        self.reused_tokens += found
        with self._pool.open(prompt.tokens, cache_salt=prompt.cache_salt) as seq:
            self._pool.commit(self._pool.reserve(seq, seq.num_uncached_tokens))
        windows = windows_of(prompt.tokens)
        sampled = [
            (prompt.cache_salt, window)
            for window in np.unique(windows[windows % np.uint64(SAMPLE) == 0]).tolist()
        ]
        old = self._most_alike(sampled)
        if old is not None:
            self._compare(self._log[old], prompt, windows, found)
        for key in sampled:
            having = self._having.setdefault(key, [])
            having.append(len(self._log))
            del having[:-KEPT_OF_A_WINDOW]
        self._log.append(prompt)

    def _most_alike(self, sampled: list[tuple[str | None, int]]) -> int | None:
        votes = Counter(number for key in sampled for number in self._having.get(key, ()))
        return max(votes, key=lambda number: (votes[number], number), default=None)

    def _compare(self, old: LoggedPrompt, new: LoggedPrompt, windows: Windows, found: int) -> None:
        gaps = find_gaps(old.tokens, new.tokens)
        old_windows = windows_of(old.tokens)
        left = [_inside(old_windows, gap.old_begin, gap.old_end) for gap in gaps]
        come = [_inside(windows, gap.begin, gap.end) for gap in gaps]
        # What is missing at one place and new at another was moved: it is lost too.
        moved = np.intersect1d(np.concatenate(left), np.concatenate(come)) if gaps else old_windows[:0]
        counted: set[tuple[str, str]] = set()
        for gap, gone, there in zip(gaps, left, come, strict=True):
            arrived = np.isin(there, moved)
            lost = max(0, gap.end + gap.common - max(gap.end, found)) + _covered(arrived, gap.begin, found)
            if lost >= WINDOW:
                in_motion = _covered(arrived, 0, 0) + _covered(np.isin(gone, moved), 0, 0)
                is_moved = 2 * in_motion > gap.end - gap.begin + gap.old_end - gap.old_begin
                self._note(old, new, gap, lost, is_moved, counted)

    def _note(
        self,
        old: LoggedPrompt,
        new: LoggedPrompt,
        gap: Gap,
        lost: int,
        is_moved: bool,
        counted: set[tuple[str, str]],
    ) -> None:
        spans = (
            self._span(old.tokens, gap.old_begin, gap.old_end),
            self._span(new.tokens, gap.begin, gap.end),
        )
        cause, old_span, new_span, begin = find_cause(*spans, is_moved=is_moved)
        before = new_span.text[max(0, new_span.begin - CONTEXT) : new_span.begin]
        # The same place in other prompts: the text ahead on its line, whatever the numbers in it.
        ahead = new_span.text[max(0, begin - CONTEXT) : begin].rstrip().rpartition("\n")[2][-24:]
        place = "".join("#" if letter.isdigit() else letter for letter in ahead)
        key = (cause, place)
        if key not in self.findings:
            self.findings[key] = Finding(
                cause=cause,
                advice=CAUSES[cause],
                lost_tokens=0,
                num_prompts=0,
                before=before,
                old=old_span.part[:SHOWN],
                new=new_span.part[:SHOWN],
                old_token=self._decode(old.tokens[gap.old_begin : gap.old_begin + 1]),
                new_token=self._decode(new.tokens[gap.begin : gap.begin + 1]),
                position=gap.begin,
                where=new.where,
                against=old.where,
            )
        finding = self.findings[key]
        finding.lost_tokens += lost
        finding.num_prompts += key not in counted
        counted.add(key)

    def _span(self, tokens: Tokens, begin: int, end: int) -> Span:
        text = self._decode(tokens)
        begin_at = len(self._decode(tokens[:begin]))
        return Span(text, begin_at, max(begin_at, len(self._decode(tokens[:end]))))

    def _decode(self, tokens: Tokens) -> str:
        return self._tokenizer.decode(tokens.tolist())


def _inside(windows: Windows, begin: int, end: int) -> Windows:
    """Return the windows of the tokens [begin, end)."""
    return windows[begin : max(begin, end - WINDOW + 1)]


def _covered(starts: np.ndarray[Any, np.dtype[np.bool_]], offset: int, found: int) -> int:
    """Return how many tokens behind `found` lie in a window that begins where `starts` says."""
    if not starts.any():
        return 0
    covered = np.zeros(len(starts) + WINDOW - 1, np.bool_)
    for place in range(WINDOW):
        covered[place : place + len(starts)] |= starts
    return int(np.count_nonzero(covered[max(0, found - offset) :]))
