"""A snapshot survives the way through a file; whatever is no snapshot is refused in one sentence."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_snapshots import empty_snapshot, small_snapshot

from pagedkv.errors import UsageError
from pagedkv.snapshot import PoolSnapshot


def saved(snapshot: PoolSnapshot, path: Path) -> bytes:
    snapshot.save(path)
    return path.read_bytes()


def refusal(path: Path) -> str:
    with pytest.raises(UsageError) as error:
        PoolSnapshot.load(path)
    assert str(error.value).startswith(f"{path}: expected ")
    return str(error.value).removeprefix(f"{path}: ")


@pytest.mark.parametrize("snapshot", [small_snapshot(), empty_snapshot(1), empty_snapshot(1000)])
def test_what_was_saved_is_loaded(snapshot: PoolSnapshot, tmp_path: Path) -> None:
    path = tmp_path / "no suffix needed"
    snapshot.save(path)
    loaded = PoolSnapshot.load(str(path))
    for name, value in snapshot._asdict().items():
        other = getattr(loaded, name)
        if isinstance(value, np.ndarray):
            assert other.dtype == value.dtype
            np.testing.assert_array_equal(other, value)
        else:
            assert type(other) is type(value)
            assert other == value


def test_the_file_is_an_npz_without_pickles(tmp_path: Path) -> None:
    data = saved(small_snapshot(), tmp_path / "s.npz")
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        assert {*PoolSnapshot._fields, "salt_lengths", "format"} == set(arrays)
        assert arrays["state"].tolist() == small_snapshot().state.tolist()


def test_pages_come_in_the_order_of_their_eviction() -> None:
    assert small_snapshot().next_evicted(2).tolist() == [3, 1]
    assert small_snapshot().next_evicted(99).tolist() == [3, 1, 2]
    assert empty_snapshot(4).next_evicted(1).tolist() == []


def test_a_file_that_cannot_be_read_or_written_is_named(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none") == "expected a readable file, got No such file or directory"
    assert refusal(tmp_path) == "expected a readable file, got Is a directory"
    with pytest.raises(UsageError, match="no/x: expected a file that can be written, got No such file"):
        small_snapshot().save(tmp_path / "no" / "x")


@pytest.mark.parametrize("content", [b"", b"no zip", b"\x93NUMPY\x01\x00", b"PK\x03\x04" + bytes(40)])
def test_a_file_of_another_kind_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "s.npz"
    path.write_bytes(content)
    assert refusal(path).startswith("expected a snapshot of pagedkv, got File is not a zip file")


def rewrite(path: Path, **changes: np.ndarray | bytes) -> None:
    """Replace members of an archive, or add them."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    for name, value in changes.items():
        if isinstance(value, np.ndarray):
            file = io.BytesIO()
            np.save(file, value)
            value = file.getvalue()
        members[f"{name}.npy"] = value
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)


OF_TEN_GIGABYTES = b"\x93NUMPY\x01\x00v\x00" + (
    b"{'descr': '|u1', 'fortran_order': False, 'shape': (10000000000,), }".ljust(117) + b"\n"
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"more": np.zeros(1)}, "a zip with other members"),
        ({"format": np.frombuffer(b"other.snapshot.1", np.uint8)}, "another format"),
        ({"state": np.zeros(8, np.int64)}, "state as int64[8]"),
        ({"state": np.zeros((8, 1), np.uint8)}, "state as uint8[8, 1]"),
        ({"state": np.zeros(0, np.uint8)}, "no pages"),
        ({"state": np.zeros(7, np.uint8)}, "7 states and 8 of num_refs"),
        ({"state": np.full(8, 4, np.uint8)}, "state from 4 to 4"),
        ({"state": OF_TEN_GIGABYTES}, "state as uint8[10000000000]"),
        ({"state": b"\x93NUMPY\x02\x00" + bytes(100)}, "another kind of array in state"),
        ({"parent": np.full(8, 8, np.int32)}, "parent from 8 to 8"),
        ({"tenant": np.full(8, 2, np.int32)}, "tenant from 2 to 2"),
        ({"priority": np.full(8, 101, np.uint8)}, "priority from 101 to 101"),
        ({"salt_lengths": np.array([8, 3])}, "salts of other lengths"),
        ({"salt_lengths": np.array([11, -1])}, "salts of other lengths"),
        ({"block_size": np.array(0)}, "a block size of 0"),
        ({"now_s": np.array(np.nan)}, "a block size of 16 and a time of nan"),
    ],
)
def test_an_archive_that_holds_something_else_is_refused(
    changes: dict[str, np.ndarray | bytes], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "s.npz"
    small_snapshot().save(path)
    rewrite(path, **changes)
    assert refusal(path).startswith(f"expected a snapshot of pagedkv, got {message}")


def test_pickles_are_not_opened(tmp_path: Path) -> None:
    path = tmp_path / "s.npz"
    small_snapshot().save(path)
    file = io.BytesIO()
    np.save(file, np.array([{"a": 1}] * 8, object), allow_pickle=True)
    rewrite(path, state=file.getvalue())
    assert "got state as object[8]" in refusal(path)


@given(data=st.data())
def test_a_damaged_file_is_refused_or_its_damage_means_nothing(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.npz"
    content = bytearray(saved(small_snapshot(), path))
    if data.draw(st.booleans(), "cut"):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    else:
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    try:
        loaded = PoolSnapshot.load(path)
    except UsageError:
        return
    assert loaded.state.tolist() == small_snapshot().state.tolist()
