"""Head sizes that are no power of two, and groups of heads that fit no tile."""

from __future__ import annotations

import pytest
import torch
from backends import on_every_backend
from guarded import Guards
from page_worlds import LAYER, make_world

from pagedkv.ops import paged_attention, write_kv


@on_every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [80, 96, 112, 192, 256])
def test_a_head_is_written_to_its_end_and_no_further(head_dim: int, dtype: torch.dtype, backend: str) -> None:
    """Lanes that pad a head to a power of two wrote into the next one (SGLang, mojo_opset)."""
    guards = Guards()
    # The pages of head 0 of three: the other two are guard words.
    pages = torch.empty(2, 4, 16, 3, head_dim, dtype=dtype)[:, :, :, :1]
    key_pages, value_pages = (guards.empty("pages", kind) for kind in pages)
    key, value = torch.randn(2, 20, 1, head_dim).to(dtype)
    slots = torch.arange(16, 36)
    write_kv(key, value, key_pages, value_pages, slots, backend=backend)  # type: ignore[arg-type]
    guards.check()
    assert torch.equal(key_pages.flatten(0, 1)[slots], key)
    assert torch.equal(value_pages.flatten(0, 1)[slots], value)
    query = torch.randn(1, 2, head_dim).to(dtype)
    tables = torch.tensor([[1, 2]]).int(), torch.tensor([20]).int(), torch.tensor([0, 1]).int()
    out = guards.empty("out", torch.empty(1, 3, head_dim, dtype=dtype)[:, :2])
    paged_attention(query, key_pages, value_pages, *tables, out=out, backend=backend)  # type: ignore[arg-type]
    guards.check()
    logits = query[0].double() @ key[:, 0].double().T * head_dim**-0.5
    want = logits.softmax(-1) @ value[:, 0].double()
    error = (out[0].double() - want).norm() / want.norm()
    assert error < (1e-6 if dtype == torch.float32 else 6e-3)


@on_every_backend
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"), [(7, 1), (9, 3), (14, 2), (24, 1), (48, 2), (71, 1), (5, 5)]
)
def test_each_query_head_reads_the_kv_head_of_its_group(
    num_heads: int, num_kv_heads: int, backend: str
) -> None:
    """A group larger than a tile, or no divisor of it, read another head's keys (vllm-xpu-kernels, vLLM)."""
    shapes = [(1, 1, 0), (20, 20, 0), (35, 4, 0), (530, 1, 0)]
    world = make_world(shapes, num_heads=num_heads, num_kv_heads=num_kv_heads)
    for head in range(num_kv_heads):
        world.pages.blocks[:, LAYER, 1, :, head] = head + 1
    out = paged_attention(*world.arguments, backend=backend)  # type: ignore[arg-type]
    group = num_heads // num_kv_heads
    want = torch.tensor([1.0 + head // group for head in range(num_heads)])
    torch.testing.assert_close(out, want[:, None].expand_as(out), atol=1e-5, rtol=0)
