"""The table of tiles, and plans that are made from sizes alone."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install 'pagedkv[triton]'")
from hypothesis import given
from hypothesis import strategies as st

from pagedkv.kernels.triton.attention_kernels import SPLIT_TOKENS
from pagedkv.kernels.triton.tuning import (
    STATE_BYTES,
    TABLE,
    Heads,
    StatePlan,
    choose_tile,
    family_of,
    has_e4m3,
    plan_states,
)


def test_every_tile_divides_a_split() -> None:
    for row in TABLE:
        assert SPLIT_TOKENS % row.tile.block_n == 0
        assert row.tile.block_m in (16, 32, 64)


@pytest.mark.parametrize(
    "target",
    ["sm75", "sm80", "sm86", "sm89", "sm90", "sm100", "sm103", "sm120", "gfx90a", "gfx942", "gfx1100"],
)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 192, 256])
def test_every_target_has_a_tile(target: str, head_dim: int) -> None:
    for element_bytes in (2, 4) if has_e4m3(target) else (1, 2, 4):
        assert choose_tile(target, element_bytes, head_dim).block_n >= 16


def test_targets_are_sorted_by_their_instructions() -> None:
    families = {name: family_of(name) for name in ("sm86", "sm89", "sm90", "sm103", "sm120", "gfx942")}
    assert list(families.values()) == ["sm80", "sm80", "sm90", "sm100", "sm80", "gfx"]
    assert [has_e4m3(name) for name in ("sm80", "sm89", "sm90", "gfx942", "gfx950")] == [
        False,
        True,
        True,
        False,
        True,
    ]


def plan(**sizes: int) -> StatePlan:
    defaults = {
        "num_tokens": 8, "num_seqs": 8, "num_heads": 32, "head_dim": 128, "max_len": 8192,
        "split_tokens": 512,
        "head_tiles": 8, "tile_tokens": 16, "num_multiprocessors": 132, "num_groups": 0, "num_prefix_rows": 0,
    }  # fmt: skip
    return plan_states(**{**defaults, **sizes})


def test_few_sequences_have_their_splits_apart_and_many_have_not() -> None:
    few = plan()
    assert few.of_all
    assert few.num_splits == 16
    assert few.num_parts == 16
    assert plan(num_seqs=256, num_tokens=256) == StatePlan()
    assert plan(max_len=512) == StatePlan()
    assert plan(num_seqs=1, num_tokens=4096) == StatePlan()


def test_groups_are_computed_apart_in_any_batch() -> None:
    many = plan(num_seqs=256, num_tokens=256, num_groups=3, num_prefix_rows=300)
    assert not many.of_all
    assert many.group_pack == 1
    assert many.group_tiles == 300 // 16 + 3
    verifying = plan(num_seqs=64, num_tokens=256, num_groups=1, num_prefix_rows=64)
    assert verifying.group_pack == 4
    mixed = plan(num_seqs=64, num_tokens=63 + 2048, num_groups=1, num_prefix_rows=64)
    assert mixed.group_pack == 1


@given(
    num_seqs=st.integers(1, 3000),
    tokens=st.integers(1, 5000),
    max_len=st.integers(1, 2**20),
    num_groups=st.integers(0, 40),
)
def test_states_never_take_more_than_their_memory(
    num_seqs: int, tokens: int, max_len: int, num_groups: int
) -> None:
    made = plan(
        num_seqs=num_seqs, num_tokens=tokens, max_len=max_len, num_groups=num_groups, num_prefix_rows=num_seqs
    )
    assert made.num_splits * made.max_tokens * num_seqs * 32 * 130 * 4 <= STATE_BYTES
    assert made.num_splits <= -(-max_len // 512)
    assert 1 <= made.group_pack <= max(1, made.max_tokens)
    assert made.num_parts >= 1


def test_heads_fill_tiles_without_being_cut_short() -> None:
    assert Heads.of(4, 64) == (4, 1, 16)
    assert Heads.of(7, 64) == (7, 1, 9)
    assert Heads.of(71, 64) == (64, 2, 1)
