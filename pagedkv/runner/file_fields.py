"""The fields of a model's file, by type; errors name the key and the file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagedkv.checks import check_int, show
from pagedkv.errors import UsageError


@dataclass(frozen=True)
class Fields:
    """Values by key, and where they are from.

    A key that is absent or null has its default; without one, it is refused. All raise UsageError.

    Attributes
    ----------
    prefix : str
        Stands in front of every key.
    """

    values: Mapping[str, Any]
    where: str
    prefix: str = ""

    def get(self, key: str, default: Any = None) -> Any:
        """Return whatever there is."""
        got = self.values.get(self.prefix + key)
        return default if got is None else got

    def expect(self, key: str, got: object, known: tuple[object, ...]) -> None:
        """Refuse what is none of `known`."""
        if got not in known:
            expected = " or ".join(map(repr, known))
            raise UsageError(f"{self.prefix}{key}: expected {expected}, got {got!r}, in {self.where}")

    def integer(self, key: str, default: int | None = None) -> int:
        """Return an integer of at least 0."""
        return check_int(self.prefix + key, self.get(key, default), 0, 2**31 - 1, f", in {self.where}")

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number above 0."""
        got = self.get(key, default)
        if not isinstance(got, int | float) or isinstance(got, bool) or not 0 < got < math.inf:
            name = self.prefix + key
            raise UsageError(f"{name}: expected a number above 0, got {show(got)}, in {self.where}")
        return float(got)

    def number_or_none(self, key: str, default: float | None = None) -> float | None:
        """Return a finite number above 0, or None where neither the file nor the default has one."""
        return None if self.get(key, default) is None else self.number(key, default)

    def flag(self, key: str, default: bool = False) -> bool:
        """Return True or False."""
        got = self.get(key, default)
        if not isinstance(got, bool):
            raise UsageError(f"{self.prefix}{key}: expected true or false, got {show(got)}, in {self.where}")
        return got

    def token_ids(self, key: str) -> frozenset[int]:
        """Return one token id or a list of them as a set."""
        got = self.get(key)
        listed = got if isinstance(got, list) else [] if got is None else [got]
        name = self.prefix + key
        return frozenset(check_int(name, token, 0, 2**32 - 1, f", in {self.where}") for token in listed)

    def mapping(self, key: str) -> Mapping[str, Any]:
        """Return an object; empty when there is none."""
        got = self.get(key) or {}
        if not isinstance(got, Mapping):
            raise UsageError(f"{self.prefix}{key}: expected an object, got {show(got)}, in {self.where}")
        return got
