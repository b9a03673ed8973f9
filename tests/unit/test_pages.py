"""KVPages: where the K and V of a token lie."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagedkv import KVCacheSpec, KVGroup, KVLayout, KVPages, ShapeError, StateError, UsageError
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
    dtype=st.sampled_from(["float32", "bfloat16", "float16", "float8_e4m3fn", "int8"]),
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


@everywhere
def test_scales_have_memory_of_their_own(arrangement: Arrangement, layout: KVLayout) -> None:
    spec = KVCacheSpec.uniform(3, 2, 8, "int8", 4, layout, "token_head")
    pages = KVPages(spec, 5, arrangement=arrangement)
    assert pages.blocks.shape == (5, 3, 2, 4, 2, 8)
    pages.blocks.fill_(7)
    views = [scales for layer in range(3) for scales in pages.scales(layer)]
    for i, scales in enumerate(views):
        assert scales is not None
        assert (scales.shape, scales.dtype) == ((5, 4, 2), torch.float32)
        scales.copy_(torch.arange(40.0).view(5, 4, 2) + 100 * i)
    assert bool((pages.blocks == 7).all())
    for i, scales in enumerate(views):
        assert scales is not None
        assert torch.equal(scales, torch.arange(40.0).view(5, 4, 2) + 100 * i)
    assert pages.size_bytes == 5 * spec.bytes_per_block
    assert sum(extents.untyped_storage().nbytes() for extents in pages.extents) == pages.size_bytes


@everywhere
def test_extents_hold_all_of_a_block(arrangement: Arrangement, layout: KVLayout) -> None:
    spec = KVCacheSpec.uniform(3, 2, 8, "float8_e4m3fn", 4, layout, "token_head")
    pages = KVPages(spec, 5, arrangement=arrangement)
    for extents in pages.extents:
        memory = extents.view(torch.uint8) if extents.element_size() == 1 else extents
        memory.zero_()
        memory[2] = 1
    ones = pages.blocks.view(torch.uint8) == 1
    assert bool(ones[2].all())
    assert int(ones.sum()) == ones[2].numel()
    for layer in range(3):
        for scales in pages.scales(layer):
            assert scales is not None
            assert (scales != 0).flatten(1).all(1).tolist() == [False, False, True, False, False]


def test_a_block_and_its_scales_are_one_extent() -> None:
    spec = KVCacheSpec.uniform(3, 2, 8, "int8", 4, scales="token_head")
    pages = KVPages(spec, 5)
    [extents] = pages.extents
    assert extents.shape == (5, spec.bytes_per_block)
    assert extents.is_contiguous()
    [scales, _] = pages.scales(0)
    assert scales is not None
    assert scales.data_ptr() - pages.blocks.data_ptr() == 3 * 2 * 4 * 2 * 8  # behind K and V of all layers


def test_scales_are_given_once_and_for_8_bits_only() -> None:
    pages = KVPages(KVCacheSpec.uniform(2, 2, 8, "int8"), 3)
    assert pages.scales(1) == (None, None)
    key, value = torch.tensor(0.5), torch.tensor([0.5, 2.0])
    for wrong in (0.5, torch.ones(3), torch.ones(2).double(), torch.ones(1, 2), torch.ones(2, device="meta")):
        with pytest.raises(ShapeError, match=r"value: expected \[\] or \[2\] float32 on cpu, got .*"):
            pages.set_scales(1, key, wrong)  # type: ignore[arg-type]
    assert pages.scales(1) == (None, None)
    pages.set_scales(1, key, value)
    assert pages.scales(1) == (key, value)
    assert pages.scales(0) == (None, None)
    with pytest.raises(StateError, match="set_scales: expected a layer without scales, got layer 1"):
        pages.set_scales(1, key, value)
    with pytest.raises(UsageError, match="layer: "):
        pages.set_scales(2, key, value)
    computed = KVCacheSpec.uniform(1, 2, 8, "int8", scales="token_head")
    for spec in (KVCacheSpec.uniform(1, 2, 8, "float16"), computed):
        with pytest.raises(UsageError, match="expected pages of 8 bits without scales, got pages of"):
            KVPages(spec, 3).set_scales(0, key, value)


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


@pytest.mark.parametrize("num_blocks", [0, -1, 2**31, True, 2.0, "4", None])
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
