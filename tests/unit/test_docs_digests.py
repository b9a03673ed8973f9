"""The digests printed in the documentation are those that the code computes."""

from __future__ import annotations

import doctest
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs" / "concepts" / "digests.md"


def test_every_digest_in_the_documentation_stands() -> None:
    results = doctest.testfile(str(DOCS), module_relative=False, encoding="utf-8")
    assert results.attempted >= 9
    assert results.failed == 0
