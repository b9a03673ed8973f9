"""Few cases in which any two (or three) values of different options meet."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Case = dict[str, Any]


def covering(
    options: Mapping[str, Sequence[Any]],
    strength: int,
    make_valid: Callable[[Case], Case] = lambda case: case,
    seed: int = 0,
) -> list[Case]:
    """Cases until every `strength` values that can meet have met; greedy, and the same every time.

    `make_valid` changes a case whose values do not go together.
    """
    rng = random.Random(seed)
    names = list(options)
    missing = {
        frozenset(zip(chosen, values, strict=True))
        for chosen in combinations(names, strength)
        for values in product(*(options[name] for name in chosen))
    }
    cases = []
    for wanted in sorted(missing, key=lambda met: sorted(map(repr, met))):
        if wanted not in missing:
            continue
        best: Case = {}
        best_met: set[frozenset[Any]] = set()
        for _ in range(20):
            case = make_valid({name: rng.choice(options[name]) for name in names} | dict(wanted))
            met = {frozenset(some) for some in combinations(case.items(), strength)} & missing
            if len(met) > len(best_met):
                best, best_met = case, met
        missing -= best_met
        missing.discard(wanted)  # also where its values never go together
        if best:
            cases.append(best)
    return cases
