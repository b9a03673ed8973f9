"""Every error that pagedkv raises.

::

    PagedKVError
    ├── CapacityError                       normal life: wait, preempt or retry
    │   ├── OutOfBlocksError                .needed .free .evictable
    │   └── TierFullError
    ├── UsageError(ValueError)              the caller's arguments
    │   ├── SpecError                       an impossible or mismatched KVCacheSpec
    │   └── ShapeError                      .name .expected .got
    ├── StateError(RuntimeError)            right arguments, wrong moment
    ├── TierError(OSError)                  input and output below the device
    │   └── CorruptBlockError
    ├── RankError                           another of several processes has failed
    ├── BackendUnavailableError(ImportError)  names the extra to install
    └── IntegrityError(AssertionError)      our bug; please report it

Messages follow one grammar: *what: expected …, got …, where*. A call that raises has changed nothing.
"""

from __future__ import annotations

from typing import Any


class PagedKVError(Exception):
    """The root of the tree."""


class CapacityError(PagedKVError):
    """There is no room now; there may be later."""


class OutOfBlocksError(CapacityError):
    """The pool has too few pages for the call.

    Attributes
    ----------
    needed, free, evictable : int
        Pages the call needs, pages that hold nothing, and pages that could be evicted for it.
    """

    def __init__(self, message: str, needed: int, free: int, evictable: int) -> None:
        super().__init__(message, needed, free, evictable)
        self.needed = needed
        self.free = free
        self.evictable = evictable

    def __str__(self) -> str:
        return str(self.args[0])


class TierFullError(CapacityError):
    """A lower store has no room for a block."""


class UsageError(PagedKVError, ValueError):
    """An argument is wrong."""


class SpecError(UsageError):
    """A KVCacheSpec is impossible, or does not fit what it is used with."""


class ShapeError(UsageError):
    """A tensor has the wrong shape, dtype or device.

    Attributes
    ----------
    name : str
        The argument.
    expected, got : object
        What it should be and what it is.
    """

    def __init__(self, message: str, name: str, expected: Any, got: Any) -> None:
        super().__init__(message, name, expected, got)
        self.name = name
        self.expected = expected
        self.got = got

    def __str__(self) -> str:
        return str(self.args[0])


class StateError(PagedKVError, RuntimeError):
    """The call is right but comes at the wrong moment: a closed sequence, a page freed twice."""


class TierError(PagedKVError, OSError):
    """A lower store failed."""


class CorruptBlockError(TierError):
    """A stored block does not match its checksum; it counts as a miss."""


class RankError(PagedKVError):
    """Another of the processes that compute a model together has failed; the message says which, and why."""


class BackendUnavailableError(PagedKVError, ImportError):
    """A backend or an extra is not installed; the message names what to install."""


class IntegrityError(PagedKVError, AssertionError):
    """An invariant of pagedkv itself is broken. This is a bug of ours; please report it."""
