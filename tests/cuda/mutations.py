"""What is broken on purpose in csrc/cuda, one at a time: every barrier and wait, and what is listed here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ORDERING = re.compile(r"^ *((block_barrier<kWarps>|__syncwarp|__syncthreads|wait_for_copies)\(\);.*)\n", re.M)


class Mutation(NamedTuple):
    file: str
    old: str
    new: str
    place: int = 0  # of several like `old`

    def apply(self, folder: Path) -> None:
        path = folder / self.file
        parts = path.read_text().split(self.old)
        assert len(parts) > self.place + 1, f"{self.old!r} is no longer in {self.file}"
        kept = self.old.join(parts[: self.place + 1]), self.old.join(parts[self.place + 1 :])
        path.write_text(self.new.join(kept))

    def __str__(self) -> str:
        what = f"remove {self.old.strip()}" if not self.new else f"{self.old.strip()} -> {self.new.strip()}"
        return f"{self.file}: {what}"


def orderings(folder: Path) -> Iterator[Mutation]:
    """Everything that makes threads wait, but for the definitions."""
    for path in sorted([*folder.glob("*.cu"), *folder.glob("*.cuh")]):
        if path.name in ("device.cuh", "tensor_core.cuh"):
            continue
        seen: dict[str, int] = {}
        for match in ORDERING.finditer(path.read_text()):
            line = match[0]
            yield Mutation(path.name, line, "", seen.get(line, 0))
            seen[line] = seen.get(line, 0) + 1


LISTED = [
    # softmax
    Mutation("attend.cuh", "fmaf(states[row].sum, shrink[row], sum)", "states[row].sum + sum"),
    Mutation("attend.cuh", "column[2] *= shrink[1];", ""),
    Mutation("attend.cuh", "__shfl_xor_sync(kWholeWarp, top, 2)", "top"),
    Mutation("attend.cuh", "state.sum += __shfl_xor_sync(kWholeWarp, state.sum, 1);", ""),
    Mutation("attend.cuh", "top == minus_infinity() ? 0.0f : top", "top"),
    Mutation("state.cuh", "if (weights.next == 0.0f) return before * weights.before;", ""),
    Mutation("state.cuh", "if (weights.before == 0.0f) return next * weights.next;", ""),
    Mutation("state.cuh", "next.sum * weights.next", "next.sum"),
    Mutation("state.cuh", "fmaf(before, weights.before, next * weights.next)", "before + next"),
    Mutation("state.cuh", "exp2_approximately(logit - top))", "0.0f)"),
    Mutation("state.cuh", "finished.factor == 0.0f ? 0.0f : sum", "sum"),
    # which keys
    Mutation("logits.cuh", "if (key >= keys.end) return false;", "if (key > keys.end) return false;"),
    Mutation("logits.cuh", "key > row.position) return false", "key >= row.position) return false"),
    Mutation("logits.cuh", "row.position - key >= p.window", "row.position - key > p.window"),
    Mutation("logits.cuh", "key - row.position >= p.window", "key - row.position > p.window"),
    Mutation("logits.cuh", "last > tile.first_query_position", "last > tile.last_query_position"),
    Mutation("logits.cuh", "tile.last_query_position - first >= p.window", "false"),
    Mutation("logits.cuh", "column < 0 || column >= p.max_new", "column <= 0 || column >= p.max_new"),
    Mutation("logits.cuh", "return !has_mask || last < tile.seq.first_position;", "return true;"),
    Mutation("logits.cuh", "x *= key_scales[key];", ""),
    Mutation("rows.cuh", "lower_end(last + 1)", "lower_end(last)"),
    Mutation("rows.cuh", "lower_end(last + p.window)", "lower_end(last + p.window - 1)"),
    Mutation("rows.cuh", "keys.begin = first - p.window + 1", "keys.begin = first - p.window + 2"),
    # which rows
    Mutation("rows.cuh", "/ job.tile_rows + i;", "/ job.tile_rows;"),
    Mutation("rows.cuh", "seq_rows <= job.few_rows", "seq_rows < job.few_rows"),
    Mutation("rows.cuh", "rest < job.tile_rows ? rest : job.tile_rows", "job.tile_rows"),
    Mutation("rows.cuh", "from_first_query % group", "index % group"),
    Mutation("rows.cuh", "tile.row(tile.num_rows - 1).query", "tile.first.query"),
    Mutation("attend_kernel.cuh", "index < tile.num_rows ? p.head_dim - d : 0", "p.head_dim - d"),
    # pages
    Mutation("key_tiles.cuh", "page >= 0 && page < p.num_blocks", "page >= 0"),
    Mutation(
        "key_tiles.cuh",
        "return page * view.block_stride",
        "return static_cast<int32_t>(page * view.block_stride)",
    ),
    Mutation("key_tiles.cuh", "*reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);", ""),
    Mutation("key_tiles.cuh", "if (scales != nullptr) x[part] *= scales[row];", ""),
    Mutation("attend.cuh", "[block & 1]", "[0]"),
    Mutation("odd_values.cuh", "if (seen[i / 2] && is_odd(x))", "if (is_odd(x))"),
    Mutation("odd_values.cuh", "if (is_odd(Products::widen(element))) element = {};", ""),
    # splits
    Mutation("attend_kernel.cuh", "(block + 1) % (kSplitTokens / kKeys) == 0 || ", ""),
    Mutation("attend_kernel.cuh", "      split.clear();\n", ""),
    Mutation("attend_kernel.cuh", "- job.first_split - blockIdx.z", "- job.first_split + blockIdx.z"),
    Mutation("attend_kernel.cuh", "turn += gridDim.z", "turn = turns.end"),
    Mutation("paged_attention.cu", "split < own_end && split", "split + 1 < own_end && split"),
    Mutation("paged_attention.cu", "if (job.first_split > 0) {", "if (false) {"),
    Mutation(
        "paged_attention.cu", "if (job.is_last_wave) finish_row(p, token", "if (false) finish_row(p, token"
    ),
    # the other operations
    Mutation("write_kv.cu", "slot >= p.num_blocks * p.block_size", "slot > p.num_blocks * p.block_size"),
    Mutation("write_kv.cu", "apart = kWarpThreads / 2", "apart = kWarpThreads / 4"),
    Mutation("write_kv.cu", "scale == 0.0f ? 0.0f : x / scale", "x / scale"),
    Mutation("write_kv.cu", "if (side.scales.token_stride == 0)", "if (false)"),
    Mutation("numbers.cuh", "+ (whole >> 20 & 1)", "+ 1"),
    Mutation("numbers.cuh", "if (magnitude < 0x1p-6f)", "if (magnitude < 0x1p-7f)"),
    Mutation("blocks.cu", "conflicts |= i != j && sources[j] == destination", "conflicts |= false"),
    Mutation("blocks.cu", "bits |= view->strides[dim];", ";"),
    Mutation("blocks.cu", "if (id < 0 || id >= end.num_blocks) return nullptr;", ""),
    Mutation("merge_states.cu", "{lse * kLog2e, 1.0f}", "{lse, 1.0f}"),
]
