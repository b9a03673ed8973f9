"""What a row has to keep to, and what a run's outcome is worth."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

HOLDS, MISSED, NOT_MEASURED = 0, 1, 3
"""Exit codes: all bounds hold; one is missed, twice; a row or its peer could not be measured."""


class Bound(NamedTuple):
    """The median of a series lies at or below a sum: so many times other series' medians, and a constant."""

    series: str
    terms: tuple[tuple[float, str], ...] = ()
    constant: float = 0.0

    def limit(self, medians: Mapping[str, float]) -> float:
        """Return what the series may reach, in the unit of the row.

        Raises
        ------
        KeyError
            With the name of a series that was not measured.
        """
        return self.constant + sum(factor * medians[series] for factor, series in self.terms)

    def text(self, unit: str) -> str:
        """Say the bound in words: a factor below 1 reads as how many times faster."""
        whose = "" if self.series == "pagedkv" else f"{self.series}: "
        if len(self.terms) == 1 and self.terms[0][0] < 1 and not self.constant:
            [(factor, other)] = self.terms
            return f"{whose}{1 / factor:.3g} × faster than {other}"
        terms = [f"{factor:,.5g} × {other}" for factor, other in self.terms]
        if self.constant:
            terms.append(f"{self.constant:,.4g} {unit}")
        return f"{whose}≤ {' + '.join(terms)}"


def at_most(factor: float, other: str, series: str = "pagedkv") -> Bound:
    """Bound by so many times another series."""
    return Bound(series, ((factor, other),))


def faster(factor: float, other: str, series: str = "pagedkv") -> Bound:
    """Bound by a part of another series."""
    return at_most(1 / factor, other, series)


def absolute(constant: float, series: str = "pagedkv") -> Bound:
    """Bound by a number in the unit of the row."""
    return Bound(series, (), constant)


class Verdict(NamedTuple):
    """A bound and what came of it; `holds` is None when a series of it was not measured."""

    bound: Bound
    limit: float | None
    value: float | None
    holds: bool | None


def judge(bound: Bound, medians: Mapping[str, float]) -> Verdict:
    """Hold a bound against the medians of one run."""
    value = medians.get(bound.series)
    if value is None or any(series not in medians for _, series in bound.terms):
        return Verdict(bound, None, value, None)
    limit = bound.limit(medians)
    return Verdict(bound, limit, value, value <= limit)


def judge_pairs(bound: Bound, samples: Mapping[str, Sequence[float]]) -> Verdict:
    """Hold a bound against series that were sampled in turns: it holds if it does in the median turn.

    The limit is that of the medians, and the value what stands to it as the median turn's does to its own.
    """
    needed = [bound.series, *(series for _, series in bound.terms)]
    if any(not samples.get(series) for series in needed):
        return judge(bound, {series: median(values) for series, values in samples.items() if values})
    turns = zip(*(samples[series] for series in needed), strict=True)
    ratios = [turn[0] / bound.limit(dict(zip(needed, turn, strict=True))) for turn in turns]
    limit = bound.limit({series: median(samples[series]) for series in needed})
    return Verdict(bound, limit, limit * median(ratios), median(ratios) <= 1)


def exit_code(verdicts: Iterable[Verdict], *, all_measured: bool) -> int:
    """Sum a run up. A bound that is known to be missed weighs more than one that is not known."""
    outcomes = [verdict.holds for verdict in verdicts]
    if False in outcomes:
        return MISSED
    return HOLDS if all_measured and None not in outcomes else NOT_MEASURED
