"""What is done to a logit, in which order, and for which keys: where other kernels went wrong."""

from __future__ import annotations

import pytest
import torch
from backends import on_every_backend
from probes import HEAD_DIM, identity_pages, identity_query, int32, probe

from pagedkv.ops import merge_attention_states, paged_attention


def near(*values: float) -> torch.Tensor:
    return torch.tensor(values)


@on_every_backend
def test_the_soft_cap_comes_before_the_mask(backend: str) -> None:
    """A masked logit of −inf became −cap, a visible weight (flashinfer, sgl-kernel-xpu)."""
    weights, _ = probe([0.0] * 5, backend=backend, soft_cap=1.0)
    torch.testing.assert_close(weights[0, :5], torch.full((5,), 0.2))
    assert weights[0, 5:].abs().max() == 0


@on_every_backend
def test_the_soft_cap_is_not_dropped(backend: str) -> None:
    weights, _ = probe([0.0, 10.0, 20.0, 30.0, 40.0], backend=backend, soft_cap=30.0)
    assert float(weights[0, 4]) == pytest.approx(0.96265, abs=1e-5)  # 0.99995 without


@on_every_backend
def test_a_window_counts_the_query_itself(backend: str) -> None:
    """One key short, or twice the window, or none in decode (SGLang, transformers, vLLM, mistral.rs)."""
    weights, _ = probe([0.0] * 10, backend=backend, window=4)
    torch.testing.assert_close(weights[0, :10], near(0, 0, 0, 0, 0, 0, 0.25, 0.25, 0.25, 0.25))
    rows, _ = probe([0.0] * 10, num_queries=10, backend=backend, window=4)
    for p in range(10):
        seen = range(max(0, p - 3), p + 1)
        want = [1 / len(seen) if j in seen else 0.0 for j in range(HEAD_DIM)]
        torch.testing.assert_close(rows[p], torch.tensor(want))
    for length in (3, 4, 5):
        weights, _ = probe([0.0] * length, backend=backend, window=4)
        assert float(weights[0, length - 1]) == pytest.approx(1 / min(length, 4))


@on_every_backend
def test_a_window_is_the_same_in_chunks(backend: str) -> None:
    whole, _ = probe([0.0] * 10, num_queries=10, backend=backend, window=4)
    for begin in range(0, 10, 3):
        end = min(begin + 3, 10)
        chunk, _ = probe([0.0] * end, num_queries=end - begin, backend=backend, window=4)
        assert torch.equal(chunk, whole[begin:end])


@on_every_backend
def test_pages_in_front_of_the_window_may_be_somebody_elses(backend: str) -> None:
    """They are freed and written by others, while the table keeps their ids (vLLM)."""
    pages = identity_pages([0.0] * 24, [0, 1, 2], block_size=8)
    pages[:, 0] = float("nan")
    want, _ = probe([0.0] * 24, [0, 1, 2], block_size=8, backend=backend, window=8)
    for first in (0, -1, 2**31 - 1):
        out = paged_attention(
            identity_query(),
            *pages,
            int32([first, 1, 2]),
            int32(24),
            int32(0, 1),
            window=8,
            backend=backend,  # type: ignore[arg-type]
        )
        assert torch.equal(out[:, 0], want)


SLOPE = torch.tensor([0.5])


@on_every_backend
def test_alibi_is_0_at_the_query_itself(backend: str) -> None:
    """Off by one it can't be seen in the weights, but in the lse and beside a sink (vLLM)."""
    _, lse = probe([0.0] * 6, backend=backend, alibi_slopes=SLOPE)
    assert float(lse) == pytest.approx(0.88168, abs=1e-5)  # 0.38168 off by one
    weights, _ = probe([0.0] * 6, backend=backend, alibi_slopes=SLOPE, sinks=torch.zeros(1))
    assert float(weights[0, 5]) == pytest.approx(0.29283, abs=1e-5)  # 0.24608
    _, lse = probe([0.0] * 6, num_queries=2, backend=backend, alibi_slopes=SLOPE)
    torch.testing.assert_close(lse, near(0.84710, 0.88168), atol=1e-5, rtol=0)


@on_every_backend
def test_alibi_in_parts_is_alibi_of_the_whole(backend: str) -> None:
    want, want_lse = probe([0.0] * 6, backend=backend, alibi_slopes=SLOPE)
    outs, lses = [], []
    for part in range(3):
        seen = torch.zeros(1, 6)
        seen[:] = float("-inf")
        seen[0, 2 * part : 2 * part + 2] = 0
        # A mask reaches the new keys, so all six are new: the last query's row counts.
        mask = seen.expand(6, -1).contiguous()
        weights, lse = probe([0.0] * 6, num_queries=6, backend=backend, alibi_slopes=SLOPE, mask=mask)
        outs.append(weights[-1:, None])
        lses.append(lse[-1:, None])
    lse = torch.empty(1, 1)
    out = merge_attention_states(torch.stack(outs), torch.stack(lses), lse=lse, backend=backend)  # type: ignore[arg-type]
    torch.testing.assert_close(out[:, 0], want)
    torch.testing.assert_close(lse[:, 0], want_lse)


@on_every_backend
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("num_queries", [1, 2, 3])
def test_scales_count_on_every_path(dtype: torch.dtype, num_queries: int, backend: str) -> None:
    """They were taken and ignored by one wrapper, or where a prefix was found (flashinfer, SGLang)."""
    pages = identity_pages([0.0, 1.0, 2.0], [1], garbage=0.0)
    pages[0] *= 4
    pages[1] *= 2
    key_pages, value_pages = pages.to(dtype)
    for shape in ((), (1,), (4, 16, 1)):
        out = paged_attention(
            identity_query(num_queries),
            key_pages,
            value_pages,
            int32([1]),
            int32(3),
            int32(0, num_queries),
            key_scales=torch.full(shape, 0.25),
            value_scales=torch.full(shape, 0.5),
            backend=backend,  # type: ignore[arg-type]
        )
        torch.testing.assert_close(out[-1, 0, :3], near(0.09003, 0.24473, 0.66524), atol=1e-5, rtol=0)
