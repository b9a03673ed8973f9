"""Compile the Triton kernels for GPUs that are not here, exactly as they would be launched.

``python triton_compiling.py CASE…`` writes a JSON object for each kernel. TRITON_INTERPRET must not be set.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

TARGETS = {
    "sm80": GPUTarget("cuda", 80, 32),
    "sm90": GPUTarget("cuda", 90, 32),
    "sm100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
INSTRUCTIONS = {
    "mma": r"mma\.sync",
    "wgmma": r"wgmma\.mma_async",
    "tcgen05": r"tcgen05\.mma",
    "mfma": r"v_mfma",
}


def compile_launch(launch: Any, target: str) -> dict[str, Any]:
    """Compile what `launch` would run on `target`; return registers, memory and counts of instructions."""
    fake = SimpleNamespace(
        get_current_device=lambda: target,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: TARGETS[target],
    )
    driver.set_active(fake)
    kernel = launch.kernel.warmup(
        grid=launch.grid,
        **launch.arguments,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        enable_fp_fusion=False,
    )
    found = {"kernel": launch.kernel.__name__, "target": target, "shared": kernel.metadata.shared}
    found |= {name: launch.arguments.get(name) for name in ("BLOCK_M", "BLOCK_N")}
    found |= {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    if target.startswith("gfx"):
        text = kernel.asm["amdgcn"]
        for name in ("vgpr_count", "vgpr_spill_count", "private_segment_fixed_size"):
            found[name] = int(re.findall(rf"\.{name}:\s*(\d+)", text)[0])
        found = {
            **found,
            "registers": found.pop("vgpr_count"),
            "stack": found.pop("private_segment_fixed_size"),
        }
    else:
        text = kernel.asm["ptx"]
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            found |= _resources(file.name)
            found["spills_in_key_loop"] = _spills_in_loops(file.name)
        found["async_copies"] = len(re.findall(r"cp\.async\.c[ag]\.shared", text))
    return found | {name: len(re.findall(pattern, text)) for name, pattern in INSTRUCTIONS.items()}


def _run_tool(name: str, *arguments: str) -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin" / name
    return subprocess.run([tool, *arguments], capture_output=True, text=True, check=True).stdout


def _resources(cubin: str) -> dict[str, int]:
    fields = dict(re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", _run_tool("cuobjdump", "-res-usage", cubin)))
    return {"registers": int(fields["REG"]), "stack": int(fields["STACK"]), "local": int(fields["LOCAL"])}


def _spills_in_loops(cubin: str) -> int | None:
    """Count accesses to local memory in the innermost loops that multiply; None without such a loop."""
    lines = _run_tool("nvdisasm", "-c", cubin).splitlines()
    # What waits for memory stands behind the last exit, and jumps back into the middle of loops.
    lines = lines[: max(i for i, line in enumerate(lines) if re.search(r"\bEXIT\b", line))]
    labels = {match[1]: i for i, line in enumerate(lines) if (match := re.match(r"\.(L_x_\d+):", line))}
    loops = []
    for i, line in enumerate(lines):
        match = re.search(r"\bBRA\b.*`\(\.(L_x_\d+)\)", line)
        if match and labels.get(match[1], i) < i:
            body = lines[labels[match[1]] : i]
            if any(re.search(r"\b(HMMA|HGMMA|UTC\w*MMA|FFMA)\b", line) for line in body):
                loops.append((labels[match[1]], i))
    inner: list[
        tuple[int, int]
    ] = []  # a jump back from code that was moved away may look like a loop around half of one
    for loop in sorted(loops, key=lambda loop: loop[1] - loop[0]):
        if all(loop[1] < other[0] or other[1] < loop[0] for other in inner):
            inner.append(loop)
    if not inner:
        return None
    return sum(bool(re.search(r"\b(LDL|STL)\b", line)) for a, b in inner for line in lines[a:b])


def attention_case(
    *, target: str, dtype: str = "bfloat16", head_dim: int = 128, block_size: int = 16, page_dtype: str = "",
    num_tokens: int = 8, num_seqs: int = 8, grouped: bool = False, plain: bool = True, masked: bool = False,
) -> list[Any]:  # fmt: skip
    """Launches of a decode batch, which has both the states' kernel and the fold."""
    from pagedkv.kernels.triton.attention import paged_attention_launches

    heads, kv_heads = 32, 8
    tokens = getattr(torch, dtype)
    query = torch.zeros(num_tokens, heads, head_dim, dtype=tokens)
    pages = torch.zeros(2, 16, 2, block_size, kv_heads, head_dim, dtype=getattr(torch, page_dtype or dtype))
    scales = torch.zeros(16, block_size, kv_heads) if page_dtype else None
    ints = {"dtype": torch.int32}
    options: list[Any] = [head_dim**-0.5, True, 0, 0.0, None, None, None]
    if not plain:
        options = [head_dim**-0.5, True, 77, 30.0, torch.zeros(heads), torch.zeros(heads), None]
    if masked:
        options[-1] = torch.zeros(num_tokens, 16)
    groups = (torch.zeros(1, 4, **ints), torch.zeros(num_seqs, **ints)) if grouped else (None, None)
    return paged_attention_launches(
        query, pages[0, :, 0], pages[0, :, 1], torch.zeros(num_seqs, 2048 // block_size, **ints),
        torch.zeros(num_seqs, **ints), torch.zeros(num_seqs + 1, **ints), torch.empty_like(query),
        torch.zeros(num_tokens, heads), *options, scales, scales, *groups,
        target=target, num_multiprocessors=132,
    )  # fmt: skip


def other_cases(target: str) -> list[Any]:
    """Launches of the other operations, in what they have of variants."""
    from pagedkv.kernels.triton.blocks import copy_blocks_launches
    from pagedkv.kernels.triton.merging import merge_launches
    from pagedkv.kernels.triton.writing import write_kv_launches

    tokens = torch.zeros(2, 8, 8, 128, dtype=torch.bfloat16)
    slots = torch.zeros(8, dtype=torch.int64)
    outs, lses = torch.zeros(4, 8, 32, 128, dtype=torch.bfloat16), torch.zeros(4, 8, 32)
    launches = copy_blocks_launches(
        torch.zeros(8, 32, 4096, dtype=torch.bfloat16), slots, slots, target=target
    )
    by_layer = torch.zeros(4, 8, 16, 9, dtype=torch.uint8)[..., :8].transpose(0, 1)  # nothing side by side
    launches += copy_blocks_launches(by_layer, slots, slots, target=target)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        launches += merge_launches(outs.to(dtype), lses, outs[0].to(dtype), lses[0], target=target)
    for dtype in (torch.bfloat16, torch.int8, torch.float8_e4m3fn):
        pages = torch.zeros(2, 4, 16, 8, 128).to(dtype)
        for scale in (torch.zeros(4, 16, 8), torch.zeros(8).expand(4, 16, 8)):
            scales = None if dtype == torch.bfloat16 else scale
            launches += write_kv_launches(*tokens, *pages, slots, scales, scales, target=target)
    return launches


def main() -> None:
    """Write what each case, given as JSON, compiles to."""
    for case in sys.argv[1:]:
        options = json.loads(case)
        launches = other_cases(options["target"]) if options.get("others") else attention_case(**options)
        for launch in launches:
            made = options | compile_launch(launch, options["target"]) | {"case": options}
            sys.stdout.write(json.dumps(made) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
