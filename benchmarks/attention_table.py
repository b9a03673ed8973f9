"""The rows of attention: what is done, beside what, and what has to hold."""

from __future__ import annotations

from benchmarks import shapes
from benchmarks.bounds import Bound, absolute, at_most, faster
from benchmarks.shapes import Batch, with_threads
from benchmarks.table import Row

# Series beside ours: other ways to the same result, …
SDPA, MASKED, UNMASKED = "torch SDPA", "torch SDPA, masked", "torch SDPA, no mask"
BF16_PAGES, UNGROUPED, OFF = "bfloat16 pages", "ungrouped", "sharing off"
# … and what the machine needs at least.
READ, READ_ALL, COPY = "reading once", "reading for each", "memcpy"
ROOF = "reading once or GEMM"
GEMM, F32_GEMM = "bfloat16 GEMM", "float32 GEMM"

PEER = "vLLM, attention"
HARNESS = "pagedkv, attention"


def describe(batch: Batch) -> str:
    """Say a batch in words."""
    heads = f"{batch.num_heads} q heads, {batch.num_kv_heads} kv heads, head_dim {batch.head_dim}"
    return f"{batch.num_seqs} × {batch.num_queries} of {batch.num_keys:,} tokens, {heads}"


def rows_on(num_threads: int, *, bounded: bool, on_gpu: bool, in_bf16: bool) -> list[Row]:
    """Make the rows of so many threads.

    `bounded`: whether to bound what depends on the kind of processor, or only to state it. `in_bf16`: whether
    the limit of products is that of bfloat16, or else of float32.
    """
    threads = "" if on_gpu else f", {num_threads} thread{'s' * (num_threads > 1)}"

    def row(
        name: str,
        work: str,
        here: tuple[Bound, ...] = (),
        anywhere: tuple[Bound, ...] = (),
        *,
        limit: str | None = None,
        batch: Batch | None = None,
        number_bytes: int = 2,
        unit: str = "call",
    ) -> Row:
        return Row(
            with_threads(name, num_threads),
            work + threads,
            unit,
            (here if bounded else ()) + anywhere,
            () if on_gpu or name not in shapes.PEER_BATCHES else (PEER,),
            HARNESS,
            are_pairs=True,
            limit=limit,
            num_operations=batch.num_operations if batch else 0,
            num_bytes=batch.kv_bytes(number_bytes) if batch else 0,
        )

    gemm = GEMM if in_bf16 else F32_GEMM
    decode, small, cached, prefill = shapes.PEER_BATCHES.values()
    of_read = at_most(1 / 0.6, READ)
    return [
        row("machine", "a MB read in scattered pages, and a million operations", unit="piece"),
        row(
            "decode",
            f"decode, {describe(decode)}",
            (faster(2.3 if num_threads == 1 else 2.5, SDPA), of_read),
            limit=READ,
            batch=decode,
        ),
        row(
            "decode_int8",
            "the same from int8 pages",
            (faster(1.4, BF16_PAGES),),
            limit=READ,
            batch=decode,
            number_bytes=1,
        ),
        row(
            "decode_small", f"decode, {describe(small)}", (at_most(1 / 0.55, READ),), limit=READ, batch=small
        ),
        row(
            "prefill_cached",
            f"prefill over cached pages, {describe(cached)}",
            (faster(1.2, UNMASKED), at_most(1 / 0.5, GEMM)),
            limit=gemm,
            batch=cached,
        ),
        row("prefill", f"prefill, {describe(prefill)}", (faster(1.4, SDPA),), limit=gemm, batch=prefill),
        row(
            "shared",
            f"decode, {describe(shapes.SHARED)}, of which {shapes.SHARED.num_shared:,} are shared",
            (faster(3.5, UNGROUPED), at_most(1 / 0.6, READ_ALL, UNGROUPED)),
            limit=ROOF,
            batch=shapes.SHARED,
        ),
        row(
            "unshared",
            f"prepare and decode, {describe(shapes.UNSHARED)}, nothing shared",
            anywhere=(at_most(1.03, OFF),),
            batch=shapes.UNSHARED,
        ),
        row("write_kv", "write_kv of 8,192 tokens", anywhere=(at_most(1 / 0.8, COPY),), limit=COPY),
        row("copy_blocks", "copy_blocks, 128 of 512 kB", anywhere=(at_most(1 / 0.8, COPY),), limit=COPY),
        row("gather_blocks", "gather_blocks, 128 of 512 kB", anywhere=(at_most(1 / 0.8, COPY),), limit=COPY),
        row(
            "overhead",
            "Python to kernel and back, one query and one key",
            anywhere=() if on_gpu else (absolute(15),),
        ),
    ]


def rows(*, bounded: bool, on_gpu: bool, in_bf16: bool | None = None) -> list[Row]:
    """All rows; on a GPU the number of threads does not matter. `in_bf16`: by default where it is certain."""
    in_bf16 = bounded or on_gpu if in_bf16 is None else in_bf16
    threads = shapes.THREADS[:1] if on_gpu else shapes.THREADS
    options = {"bounded": bounded, "on_gpu": on_gpu, "in_bf16": in_bf16}
    return [row for number in threads for row in rows_on(number, **options)]
