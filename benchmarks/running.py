"""One row, measured by all who can, in turns; and once more when a bound is missed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median
from typing import NamedTuple, Protocol

from benchmarks.bounds import Verdict, judge, judge_pairs
from benchmarks.child import NotMeasuredError
from benchmarks.harness import Round
from benchmarks.table import Row


class Harness(Protocol):
    """What measures rows."""

    def begin(self, row: str) -> None:
        """Set up a row."""

    def round(self) -> Round:
        """Measure one round of it."""


class Outcome(NamedTuple):
    """What a row gave.

    Attributes
    ----------
    samples : Round
        By series.
    verdicts : list of Verdict
    reasons : list of str
        Why something could not be measured.
    num_tries : int
    """

    row: Row
    samples: Round
    verdicts: list[Verdict]
    reasons: list[str]
    num_tries: int

    @property
    def medians(self) -> dict[str, float]:
        """By series."""
        return {series: median(samples) for series, samples in self.samples.items()}

    @property
    def of_limit(self) -> float | None:
        """How much of what the machine allows is reached: 1 at the limit."""
        limit, ours = self.samples.get(self.row.limit or ""), self.samples.get("pagedkv")
        if not limit or not ours:
            return None
        if self.row.are_pairs:
            return median(least / time for least, time in zip(limit, ours, strict=True))
        return median(limit) / median(ours)

    @property
    def is_missed(self) -> bool:
        """Whether some bound is."""
        return any(verdict.holds is False for verdict in self.verdicts)


Progress = Callable[[str], None]


def run(row: Row, harnesses: Mapping[str, Harness], num_rounds: int, progress: Progress) -> Outcome:
    """Measure a row; when a bound is missed, the second try decides."""
    outcome = attempt(row, harnesses, num_rounds, progress, 1)
    return attempt(row, harnesses, num_rounds, progress, 2) if outcome.is_missed else outcome


def attempt(
    row: Row, harnesses: Mapping[str, Harness], num_rounds: int, progress: Progress, num_tries: int
) -> Outcome:
    """Measure a row once: in each round, everyone one after the other."""
    samples: Round = {}
    reasons: list[str] = []
    measuring = [row.harness, *row.peers]
    for number in range(num_rounds):
        for name in list(measuring):
            again = ", again" if num_tries > 1 else ""
            progress(f"{row.name}{again}: {name}, round {number + 1} of {num_rounds}")
            try:
                if number == 0:
                    harnesses[name].begin(row.name)
                new = harnesses[name].round()
            except NotMeasuredError as error:
                reasons.append(str(error))
                measuring.remove(name)
                continue
            for series, times in new.items():
                samples.setdefault(series, []).extend(times)
    if row.are_pairs:
        verdicts = [judge_pairs(bound, samples) for bound in row.bounds]
    else:
        medians = {series: median(times) for series, times in samples.items()}
        verdicts = [judge(bound, medians) for bound in row.bounds]
    return Outcome(row, samples, verdicts, reasons, num_tries)
