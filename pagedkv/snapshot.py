"""A pool's pages as arrays, at one moment: what they hold, who uses them and which go next."""

from __future__ import annotations

import zipfile
import zlib
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from pagedkv.errors import UsageError

FREE, WRITABLE, COMMITTED, EVICTABLE = 0, 1, 2, 3
STATES = ("free", "writable", "committed", "evictable")
"""Names of the values of `PoolSnapshot.state`."""

# The file is a zip of .npy members, as numpy writes them: the arrays by their names, and these.
_FORMAT = "pagedkv.snapshot.1"
_DTYPES: dict[str, np.dtype[Any]] = {
    "state": np.dtype(np.uint8),
    "num_refs": np.dtype(np.int32),
    "depth": np.dtype(np.int32),
    "parent": np.dtype(np.int32),
    "priority": np.dtype(np.uint8),
    "retained_s": np.dtype(np.float32),
    "idle_s": np.dtype(np.float32),
    "eviction_rank": np.dtype(np.int32),
    "tenant": np.dtype(np.int32),
}
_OTHERS = {"format", "salts", "salt_lengths", "block_size", "now_s"}


class PoolSnapshot(NamedTuple):
    """All pages of a pool, by block id; made by :meth:`BlockPool.snapshot`.

    Attributes
    ----------
    state : ndarray [num_blocks] uint8
        0 free, 1 writable, 2 committed, 3 evictable.
    num_refs : ndarray [num_blocks] int32
        Sequences, steps, fences and callers of `allocate` that hold the page.
    depth : ndarray [num_blocks] int32
        Index of the block in its prompt; −1 for a page that is not published.
    parent : ndarray [num_blocks] int32
        A page of the block before it; −1 for a first block and for a page that is not published.
    priority : ndarray [num_blocks] uint8
        0 to 100; who asks for nothing has 35.
    retained_s : ndarray [num_blocks] float32
        Seconds until the priority lapses; inf: never; 0: not retained.
    idle_s : ndarray [num_blocks] float32
        Seconds since the page was last released or touched; nan while it is held, or free.
    eviction_rank : ndarray [num_blocks] int32
        0 for the page that is evicted next, and so on; −1 for a page that is not evictable.
    tenant : ndarray [num_blocks] int32
        Index into `salts`; −1 for a page that belongs to nobody.
    salts : list of bytes
    block_size : int
        Tokens in a block.
    now_s : float
        Seconds since the pool was made.
    """

    state: npt.NDArray[np.uint8]
    num_refs: npt.NDArray[np.int32]
    depth: npt.NDArray[np.int32]
    parent: npt.NDArray[np.int32]
    priority: npt.NDArray[np.uint8]
    retained_s: npt.NDArray[np.float32]
    idle_s: npt.NDArray[np.float32]
    eviction_rank: npt.NDArray[np.int32]
    tenant: npt.NDArray[np.int32]
    salts: list[bytes]
    block_size: int
    now_s: float

    @property
    def num_blocks(self) -> int:
        """Pages of the pool."""
        return len(self.state)

    def next_evicted(self, num_blocks: int) -> npt.NDArray[np.int32]:
        """Return the pages that would be evicted first, at most `num_blocks`, the first one first."""
        evictable = np.flatnonzero(self.eviction_rank >= 0)
        order = np.argsort(self.eviction_rank[evictable], kind="stable")
        return evictable[order[:num_blocks]].astype(np.int32)

    def save(self, path: str | PathLike[str]) -> None:
        """Write it to a file, an .npz without pickles that :meth:`load` reads. It holds the salts.

        Raises
        ------
        UsageError
            When the file can't be written.
        """
        others = {
            "format": np.frombuffer(_FORMAT.encode(), np.uint8),
            "salts": np.frombuffer(b"".join(self.salts), np.uint8),
            "salt_lengths": np.array([len(salt) for salt in self.salts], np.int64),
            "block_size": np.array(self.block_size, np.int64),
            "now_s": np.array(self.now_s, np.float64),
        }
        arrays: dict[str, Any] = {name: getattr(self, name) for name in _DTYPES}
        try:
            with Path(path).open("wb") as file:  # numpy would add a suffix to a name
                np.savez_compressed(file, **arrays | others)
        except OSError as error:
            raise UsageError(f"{path}: expected a file that can be written, got {error.strerror}") from error

    @classmethod
    def load(cls, path: str | PathLike[str]) -> PoolSnapshot:
        """Read what :meth:`save` wrote.

        Raises
        ------
        UsageError
            When there is no such file, or it is damaged or of another kind.
        """
        try:
            with Path(path).open("rb") as file:
                return _read(file)
        except OSError as error:
            raise UsageError(f"{path}: expected a readable file, got {error.strerror}") from error
        except (ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
            raise UsageError(f"{path}: expected a snapshot of pagedkv, got {error}") from error


def _read(file: BinaryIO) -> PoolSnapshot:
    """Read a snapshot.

    Raises
    ------
    ValueError and what zipfile raises
        It is none.
    """
    with zipfile.ZipFile(file) as archive:
        members = {name.removesuffix(".npy") for name in archive.namelist()}
        if members != _OTHERS | _DTYPES.keys():
            raise ValueError("a zip with other members")
        if _member(archive, "format", np.dtype(np.uint8)).tobytes() != _FORMAT.encode():
            raise ValueError("another format")
        arrays = {name: _member(archive, name, dtype) for name, dtype in _DTYPES.items()}
        lengths = _member(archive, "salt_lengths", np.dtype(np.int64))
        salt_bytes = _member(archive, "salts", np.dtype(np.uint8)).tobytes()
        block_size = _member(archive, "block_size", np.dtype(np.int64), num_dimensions=0)
        now_s = _member(archive, "now_s", np.dtype(np.float64), num_dimensions=0)
    if (lengths < 0).any() or lengths.sum() != len(salt_bytes):
        raise ValueError("salts of other lengths")
    ends = np.cumsum(lengths)
    salts = [salt_bytes[end - length : end] for end, length in zip(ends, lengths, strict=True)]
    snapshot = PoolSnapshot(**arrays, salts=salts, block_size=int(block_size), now_s=float(now_s))
    _check_values(snapshot)
    return snapshot


def _member(
    archive: zipfile.ZipFile, name: str, dtype: np.dtype[Any], *, num_dimensions: int = 1
) -> npt.NDArray[Any]:
    """One array. Its size is compared before memory is taken for it: a header may claim anything."""
    info = archive.getinfo(f"{name}.npy")
    with archive.open(info) as member:
        if np.lib.format.read_magic(member) != (1, 0):
            raise ValueError(f"another kind of array in {name}")
        shape, _, found = np.lib.format.read_array_header_1_0(member)
        size = int(np.prod(shape, dtype=object)) * dtype.itemsize
        if found != dtype or len(shape) != num_dimensions or info.file_size != member.tell() + size:
            raise ValueError(f"{name} as {found}{list(shape)}")
        data = member.read()
    if len(data) != size:
        raise ValueError(f"{name} cut short")
    return np.frombuffer(data, dtype).reshape(shape)


def _check_values(snapshot: PoolSnapshot) -> None:
    num_blocks = snapshot.num_blocks
    if not num_blocks:
        raise ValueError("no pages")
    limits = {
        "state": (0, len(STATES) - 1),
        "num_refs": (0, 2**31 - 1),
        "depth": (-1, 2**31 - 1),
        "parent": (-1, num_blocks - 1),
        "priority": (0, 100),
        "eviction_rank": (-1, num_blocks - 1),
        "tenant": (-1, len(snapshot.salts) - 1),
    }
    for name in _DTYPES:
        values = getattr(snapshot, name)
        if len(values) != num_blocks:
            raise ValueError(f"{num_blocks} states and {len(values)} of {name}")
        low, high = limits.get(name, (None, None))
        if low is not None and not low <= values.min() <= values.max() <= high:
            raise ValueError(f"{name} from {values.min()} to {values.max()}")
    if snapshot.block_size < 1 or not np.isfinite(snapshot.now_s):
        raise ValueError(f"a block size of {snapshot.block_size} and a time of {snapshot.now_s}")
