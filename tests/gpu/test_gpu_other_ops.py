"""The other operations on a device, against the reference on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagedkv.kernels import reference


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def make_pages(dtype: torch.dtype) -> list[torch.Tensor]:
    pages = [torch.zeros(5, 16, 3, 80).to(dtype) for _ in range(2)]
    for side in pages:
        bits(side).fill_(1)
    return pages


@pytest.mark.parametrize(
    "page_dtype", [torch.bfloat16, torch.float32, torch.int8, torch.float8_e4m3fn], ids=str
)
@pytest.mark.parametrize("scales", ["none", "given", "computed"])
def test_write_kv(backend: Any, page_dtype: torch.dtype, scales: str) -> None:
    is_narrow = page_dtype.itemsize == 1
    if scales != "none" and not is_narrow:
        pytest.skip("pages that take numbers as they are have no scales")
    slots = torch.tensor([17, -1, 3, 79, 40, 16, -1])
    dtype = torch.bfloat16 if is_narrow else page_dtype
    tokens = torch.randn(2, 7, 3, 80, generator=torch.Generator().manual_seed(0)).to(dtype).unbind()
    results = []
    for on_device in (False, True):
        pages = make_pages(page_dtype)
        given: list[torch.Tensor | None] = [None, None]
        if scales == "given":
            given = [torch.tensor([0.013, 0.1, 0.4]).expand(5, 16, 3)] * 2
        elif scales == "computed":
            given = [torch.zeros(5, 16, 3) for _ in range(2)]
        if not on_device:
            reference.write_kv(*tokens, *pages, slots, *given)
        elif scales == "given":  # a copy would not keep its strides of 0
            device_scales = torch.tensor([0.013, 0.1, 0.4], device="cuda").expand(5, 16, 3)
            moved = [x.cuda() for x in (*tokens, *pages, slots)]
            backend.module.write_kv(*moved, device_scales, device_scales)
            pages = [x.cpu() for x in moved[2:4]]
        else:
            backend.run("write_kv", *tokens, *pages, slots, *given)
        results.append([*map(bits, pages), *(x for x in given if x is not None)])
    for expected, got in zip(*results, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("is_layered", [False, True])
def test_blocks(backend: Any, dtype: torch.dtype, is_layered: bool) -> None:
    blocks = torch.arange(9 * 2 * 2 * 16 * 3 * 8, device="cuda").to(dtype).view(9, 2, 2, 16, 3, 8)
    if is_layered:
        blocks = blocks.permute(1, 2, 0, 3, 4, 5).contiguous().permute(2, 0, 1, 3, 4, 5)
    before = blocks.cpu()
    for sources, destinations in (([0, 1, 1], [5, 6, 7]), ([0, 1, 2, 3], [1, 2, 3, 0])):
        got = blocks.clone()
        ids = [torch.tensor(x, device="cuda") for x in (sources, destinations)]
        backend.module.copy_blocks(got, *ids)
        expected = before.clone()
        expected[destinations] = before[sources]
        assert torch.equal(got.cpu(), expected)
    ids = torch.tensor([3, 0, 8], device="cuda")
    buffer = torch.zeros(3, *blocks.shape[1:], dtype=dtype, device="cuda")
    backend.module.gather_blocks(blocks, ids, buffer)
    assert torch.equal(buffer.cpu(), before[[3, 0, 8]])
    written = torch.zeros_like(blocks)
    backend.module.scatter_blocks(buffer, ids, written)
    assert torch.equal(written.cpu()[[3, 0, 8]], before[[3, 0, 8]])
    assert int((written != 0).flatten(1).any(1).sum()) == 3 - int((before[0] == 0).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_merge_attention_states(backend: Any, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    outs = torch.randn(3, 20, 4, 128, generator=generator).to(dtype)
    lses = torch.randn(3, 20, 4, generator=generator) * 3
    lses[0, 1] = -torch.inf
    lses[:, 2] = -torch.inf
    results = []
    for on_device in (False, True):
        out, lse = torch.full((20, 4, 128), float("nan"), dtype=dtype), torch.full((20, 4), float("nan"))
        if on_device:
            backend.run("merge_attention_states", outs, lses, out, lse)
        else:
            reference.merge_attention_states(outs, lses, out, lse)
        results.append((out.float(), lse))
    (expected, expected_lse), (got, got_lse) = results
    bound = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]
    assert float((got - expected).norm() / expected.norm()) < bound
    torch.testing.assert_close(got_lse, expected_lse, rtol=1e-5, atol=1e-5)
