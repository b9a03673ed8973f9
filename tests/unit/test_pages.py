"""KVPages: where the K and V of a token lie."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagedkv import KVCacheSpec, KVGroup, KVLayout, KVPages, UsageError
from pagedkv.pages import Arrangement

ARRANGEMENTS: list[Arrangement] = ["block", "layer"]
LAYOUTS: list[KVLayout] = ["NHD", "HND"]
everywhere = pytest.mark.parametrize(
    ("arrangement", "layout"), [(arrangement, layout) for arrangement in ARRANGEMENTS for layout in LAYOUTS]
)


def make(arrangement: Arrangement, layout: KVLayout, num_blocks: int = 5) -> KVPages:
    spec = KVCacheSpec.uniform(3, 2, 8, "float16", block_size=4, layout=layout)
    return KVPages(spec, num_blocks, arrangement=arrangement)


@everywhere
def test_shapes_do_not_depend_on_arrangement_or_layout(arrangement: Arrangement, layout: KVLayout) -> None:
    pages = make(arrangement, layout)
    assert pages.blocks.shape == (5, 3, 2, 4, 2, 8)
    assert pages.num_blocks == 5
    for layer in range(3):
        for tensor in pages[layer]:
            assert tensor.shape == (5, 4, 2, 8)
            assert tensor.dtype == torch.float16


@pytest.mark.parametrize(
    ("arrangement", "layout", "strides"),
    [
        # of num_blocks, num_layers, K and V, block_size, num_kv_heads, head_dim
        ("block", "NHD", (384, 128, 64, 16, 8, 1)),
        ("block", "HND", (384, 128, 64, 8, 32, 1)),
        ("layer", "NHD", (64, 640, 320, 16, 8, 1)),
        ("layer", "HND", (64, 640, 320, 8, 32, 1)),
    ],
)
def test_strides_are_those_of_the_arrangement_and_the_layout(
    arrangement: Arrangement, layout: KVLayout, strides: tuple[int, ...]
) -> None:
    assert make(arrangement, layout).blocks.stride() == strides


@everywhere
def test_every_element_has_its_own_memory(arrangement: Arrangement, layout: KVLayout) -> None:
    blocks = make(arrangement, layout).blocks
    flat = torch.arange(blocks.numel(), dtype=torch.float32).reshape(blocks.shape) % 2048
    blocks.copy_(flat)
    assert torch.equal(blocks.float(), flat)
    assert blocks.untyped_storage().nbytes() == blocks.numel() * 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_block_of_the_default_arrangement_is_one_contiguous_extent(layout: KVLayout) -> None:
    pages = make("block", layout)
    extent = pages.spec.bytes_per_block // pages.blocks.element_size()
    memory = torch.empty(0, dtype=torch.float16).set_(pages.blocks.untyped_storage())
    pages.blocks.zero_()
    pages.blocks[2] = 1
    assert memory.nonzero().flatten().tolist() == list(range(2 * extent, 3 * extent))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layer_of_the_layer_arrangement_is_two_contiguous_extents(layout: KVLayout) -> None:
    pages = make("layer", layout)
    memory = torch.empty(0, dtype=torch.float16).set_(pages.blocks.untyped_storage())
    pages.blocks.zero_()
    key, value = pages[1]
    key.fill_(1)
    value.fill_(2)
    extent = pages.num_blocks * 4 * 2 * 8
    assert memory.tolist() == [0] * 2 * extent + [1] * extent + [2] * extent + [0] * 2 * extent


@everywhere
def test_k_and_v_of_a_layer_are_views_of_the_blocks(arrangement: Arrangement, layout: KVLayout) -> None:
    pages = make(arrangement, layout)
    pages.blocks.zero_()
    key, value = pages[1]
    key[2, 3, 1, 5] = 1
    value[4, 0, 0, 7] = 2
    assert pages.blocks[2, 1, 0, 3, 1, 5] == 1
    assert pages.blocks[4, 1, 1, 0, 0, 7] == 2
    assert int(pages.blocks.count_nonzero()) == 2
    pages.blocks[0, 1, 0] = 3
    assert bool((key[0] == 3).all())


@given(
    num_layers=st.integers(1, 4),
    num_kv_heads=st.integers(1, 4),
    head_dim=st.integers(1, 9),
    block_size=st.integers(1, 17),
    num_blocks=st.integers(1, 9),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    layout=st.sampled_from(LAYOUTS),
    arrangement=st.sampled_from(ARRANGEMENTS),
)
def test_the_memory_is_that_of_the_spec(
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    num_blocks: int,
    dtype: str,
    layout: KVLayout,
    arrangement: Arrangement,
) -> None:
    spec = KVCacheSpec.uniform(num_layers, num_kv_heads, head_dim, dtype, block_size, layout)
    pages = KVPages(spec, num_blocks, arrangement=arrangement)
    assert pages.size_bytes == num_blocks * spec.bytes_per_block
    assert pages.size_bytes == pages.blocks.untyped_storage().nbytes()
    assert pages.blocks.dtype == getattr(torch, dtype)


def test_layers_are_found_by_the_models_numbers() -> None:
    pages = KVPages(KVCacheSpec((KVGroup((7, 3), 1, 1),)), 2)
    pages.blocks.zero_()
    pages[3][0].fill_(1)
    assert pages.blocks[:, 1, 0].min() == 1
    assert pages[np.int64(7)][1].data_ptr() == pages.blocks[:, 0, 1].data_ptr()  # type: ignore[index]
    with pytest.raises(UsageError, match=r"layer: expected one of \[3, 7\], got 0 \(int\)"):
        pages[0]


@pytest.mark.parametrize(
    "layer", [-1, 3, 2**70, True, 1.0, None, "1", [], {}, slice(1), (0,), torch.tensor(1)]
)
def test_a_layer_that_is_none_is_refused(layer: Any) -> None:
    with pytest.raises(UsageError, match=r"layer: expected one of \[0, 1, 2\], got "):
        make("block", "NHD")[layer]


@pytest.mark.parametrize("num_blocks", [0, -1, 2**31, True, 2.0, "4", None, [4]])
def test_a_number_of_blocks_that_is_none_is_refused(num_blocks: Any) -> None:
    with pytest.raises(UsageError, match=r"num_blocks: expected an integer.*, got "):
        make("block", "NHD", num_blocks)


@pytest.mark.parametrize("arrangement", [None, "Block", "", 5, []])
def test_an_unknown_arrangement_is_refused(arrangement: Any) -> None:
    with pytest.raises(UsageError, match="arrangement: expected 'block' or 'layer', got "):
        make(arrangement, "NHD")


@pytest.mark.parametrize("spec", [None, "spec", KVGroup((0,), 1, 1)])
def test_a_spec_that_is_none_is_refused(spec: Any) -> None:
    with pytest.raises(UsageError, match="spec: expected a KVCacheSpec, got "):
        KVPages(spec, 4)


@pytest.mark.parametrize("device", ["nowhere", "", None, [], 1.5])
def test_a_device_that_is_none_is_refused(device: Any) -> None:
    with pytest.raises(UsageError, match="device: expected a device that torch knows, got "):
        KVPages(KVCacheSpec.uniform(1, 1, 1), 4, device=device)


def test_pages_made_in_inference_mode_can_be_written_outside_of_it() -> None:
    with torch.inference_mode():
        pages = make("block", "NHD")
    pages[0][0].fill_(1)
    assert not pages.blocks.is_inference()
