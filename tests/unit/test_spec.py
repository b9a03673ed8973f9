"""KVGroup and KVCacheSpec: what a token costs, and which models are impossible."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkv import KVCacheSpec, KVGroup, SpecError, UsageError

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int8": 1}
GROUP = KVGroup((0, 1), 2, 8)


@given(
    num_layers=st.integers(1, 200),
    num_kv_heads=st.integers(1, 128),
    head_dim=st.integers(1, 1024),
    dtype=st.sampled_from(sorted(BYTES)),
    block_size=st.integers(1, 512),
)
def test_a_token_costs_k_and_v_of_every_head_in_every_layer(
    num_layers: int, num_kv_heads: int, head_dim: int, dtype: str, block_size: int
) -> None:
    spec = KVCacheSpec.uniform(num_layers, num_kv_heads, head_dim, dtype, block_size)
    assert spec.num_layers == num_layers
    assert spec.bytes_per_token == num_layers * num_kv_heads * head_dim * BYTES[dtype] * 2
    assert spec.bytes_per_block == spec.bytes_per_token * block_size
    assert spec.groups[0].bytes_per_token == spec.bytes_per_token
    assert spec.blocks_in(spec.bytes_per_block * 7) == 7
    assert spec.blocks_in(spec.bytes_per_block * 8 - 1) == 7


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
def test_scales_of_each_token_and_head_cost_4_bytes(dtype: str) -> None:
    spec = KVCacheSpec.uniform(3, 2, 64, dtype, scales="token_head")
    assert spec.bytes_per_token == 3 * 2 * 2 * (64 + 4)
    assert spec.bytes_per_block == 16 * spec.bytes_per_token
    assert spec != KVCacheSpec.uniform(3, 2, 64, dtype)


@pytest.mark.parametrize(
    ("dtype", "scales"),
    [("float32", "token_head"), ("float16", "token_head"), ("int8", "tensor"), ("int8", 1), ("int8", [])],
)
def test_scales_that_there_are_not_are_refused(dtype: str, scales: Any) -> None:
    with pytest.raises(SpecError, match=rf"KVGroup\.scales: expected None.* for {dtype}, got "):
        KVGroup((0,), 1, 16, dtype, scales=scales)


def test_scales_that_could_not_be_aligned_are_refused() -> None:
    with pytest.raises(SpecError, match=r"expected a multiple of 4 bytes of K and V .*, got 30"):
        KVCacheSpec.uniform(1, 3, 5, "int8", block_size=1, scales="token_head")
    assert KVCacheSpec.uniform(1, 3, 5, "int8", block_size=1).bytes_per_block == 30


def test_a_known_model_costs_what_its_card_says() -> None:
    llama_3_8b = KVCacheSpec.uniform(32, 8, 128, "bfloat16")
    assert llama_3_8b.bytes_per_token == 128 * 1024
    assert llama_3_8b.blocks_in("2GiB") == 1024


def test_defaults_are_blocks_of_16_tokens_in_nhd() -> None:
    spec = KVCacheSpec((GROUP,))
    assert (spec.block_size, spec.layout) == (16, "NHD")
    assert (GROUP.dtype, GROUP.window) == ("float32", None)


def test_specs_compare_and_hash_by_value() -> None:
    assert KVCacheSpec.uniform(2, 2, 8) == KVCacheSpec((GROUP,))
    assert KVCacheSpec.uniform(2, 2, 8) != KVCacheSpec.uniform(2, 2, 8, layout="HND")
    # Any iterable of layers and groups will do.
    same = KVCacheSpec([KVGroup([0, 1], 2, 8)])  # type: ignore[arg-type]
    assert same == KVCacheSpec((GROUP,))
    assert hash(same) == hash(KVCacheSpec((GROUP,)))


def test_narrow_integers_do_not_overflow() -> None:
    group = KVGroup((np.int8(0),), np.int8(100), np.int8(100))  # type: ignore[arg-type]
    spec = KVCacheSpec((group,), block_size=np.uint8(255))  # type: ignore[arg-type]
    assert spec.bytes_per_block == 2 * 100 * 100 * 4 * 255
    assert type(spec.bytes_per_block) is int


@pytest.mark.parametrize("value", [0, -1, 2**17, 2**80, True, np.True_, 1.5, float("nan"), "2", None, [2]])
@pytest.mark.parametrize("name", ["num_kv_heads", "head_dim", "block_size", "num_layers"])
def test_sizes_that_are_none_are_refused(name: str, value: Any) -> None:
    sizes = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 1, "block_size": 1, name: value}
    with pytest.raises(SpecError, match=rf"{name}: expected an integer.*, got "):
        KVCacheSpec.uniform(**sizes)


@pytest.mark.parametrize(
    "layers", [None, 5, (), [], "01", (0, 0), (-1,), (2**16,), (True,), (1.0,), ([],), (None,)]
)
def test_layers_that_are_none_are_refused(layers: Any) -> None:
    with pytest.raises(SpecError, match=r"KVGroup\.layers: expected .*, got "):
        KVGroup(layers, 1, 1)


@pytest.mark.parametrize("dtype", [None, [], {}, "float64", "Float32", b"float32", np.float32])
def test_unknown_dtypes_are_refused_with_the_known_ones(dtype: Any) -> None:
    with pytest.raises(SpecError, match=r"dtype: expected one of float32, .*, int8, got "):
        KVGroup((0,), 1, 1, dtype)


@pytest.mark.parametrize("window", [0, -1, 2**31, "4", False, 4.0])
def test_a_window_that_is_none_is_refused(window: Any) -> None:
    with pytest.raises(SpecError, match=r"KVGroup.window: expected an integer.*, got "):
        KVGroup((0,), 1, 1, window=window)


@pytest.mark.parametrize("groups", [None, (), [], "a", (1,), GROUP, (GROUP, 1), KVGroup])
def test_groups_that_are_none_are_refused(groups: Any) -> None:
    with pytest.raises(SpecError, match=r"groups: expected a tuple of 1 to 64 KVGroups, got "):
        KVCacheSpec(groups)


def test_a_layer_is_in_one_group() -> None:
    with pytest.raises(SpecError, match=r"groups: expected each layer in one group, got \[1\] in several"):
        KVCacheSpec((GROUP, KVGroup((1, 2), 1, 1)))


def test_groups_without_a_window_come_first() -> None:
    local = KVGroup((2,), 1, 1, window=4)
    assert KVCacheSpec((GROUP, local)).windows == (None, 4)
    with pytest.raises(SpecError, match=r"groups: expected those without a window first, got .*\(4, None\)"):
        KVCacheSpec((local, GROUP))


def test_memory_is_split_so_that_sequences_use_up_all_groups_together() -> None:
    full, local = KVGroup((0,), 1, 8), KVGroup((1, 2), 1, 8, window=64)
    spec = KVCacheSpec((full, local))
    num_full, num_local = spec.split("1MiB", num_tokens=4096, step_tokens=32)
    assert num_full // 256 == num_local // ((63 + 32) // 16 + 2)
    size = num_full * full.bytes_per_token * 16 + num_local * local.bytes_per_token * 16
    assert 0.99 * 2**20 < size <= 2**20
    assert spec.split("1MiB", num_tokens=16) == (spec.blocks_in("1MiB"),) * 2, "shorter than the window"
    with pytest.raises(UsageError, match=r"memory: expected at least one block of each group, got "):
        spec.split(1000, num_tokens=4096)


@pytest.mark.parametrize("layout", [None, [], "nhd", "HDN", 5])
def test_unknown_layouts_are_refused(layout: Any) -> None:
    with pytest.raises(SpecError, match="layout: expected 'NHD' or 'HND', got "):
        KVCacheSpec((GROUP,), layout=layout)


@pytest.mark.parametrize(
    ("memory", "num_bytes"),
    [
        ("2GiB", 2 * 1024**3),
        ("512 MB", 512 * 10**6),
        ("1.5GB", 1_500_000_000),
        ("1.5 GiB", 1536 * 1024**2),
        ("0.5tib", 2**39),
        (" 3KB\n", 3000),
        ("4096", 4096),
        ("4096B", 4096),
        ("9007199254740993", 2**53 + 1),  # a float would lose the last byte
        (4096, 4096),
        (np.uint16(65535), 65535),
        (2**63 - 1, 2**63 - 1),
    ],
)
def test_memory_is_bytes_or_a_size(memory: Any, num_bytes: int) -> None:
    assert KVCacheSpec.uniform(1, 1, 1, "float16", 1).blocks_in(memory) == num_bytes // 4


@pytest.mark.parametrize(
    "memory",
    [
        "",
        " ",
        "GB",
        "two GB",
        "-1GB",
        "1e9",
        "inf",
        "nan",
        "1.GB",
        ".5GB",
        "1,5GB",
        "1_000",
        "2G",
        "1PB",
        "1KBKB",
        "٣GB",
        "9" * 400,
        "9" * 30 + "TiB",
        None,
        1.5,
        True,
        b"2GiB",
        [],
        -1,
        2**63,
    ],
)
def test_memory_that_is_none_is_refused(memory: Any) -> None:
    with pytest.raises(UsageError, match=r"memory: expected .*, got "):
        KVCacheSpec.uniform(1, 1, 1).blocks_in(memory)


@pytest.mark.parametrize("memory", [0, 127, "0.0001KB"])
def test_memory_below_one_block_is_refused_with_its_size(memory: Any) -> None:
    with pytest.raises(UsageError, match="memory: expected at least the 128 bytes of one block, got "):
        KVCacheSpec.uniform(1, 1, 1).blocks_in(memory)
