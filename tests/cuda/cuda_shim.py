"""Builds the kernels of csrc/cuda for the host, and runs them there through the backend's own code."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from pagedkv.kernels.cuda import calls
from pagedkv.kernels.cuda.library import CudaLibrary

ROOT = Path(__file__).parents[2]
SHIM = Path(__file__).parent / "shim"
FLAGS = (
    "-std=c++20",
    "-O2",
    "-g1",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-DPAGEDKV_CPU_EMU",
    f"-I{SHIM}",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-unknown-pragmas",
)
SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")


def find_compiler() -> list[str] | None:
    """Return the command, which may have several words, such as `ccache g++`; None if it isn't there."""
    command = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    return command if shutil.which(command[0]) else None


def build(target: Path, *, csrc: Path = ROOT / "csrc", flags: Sequence[str] = (), cache: Path) -> None:
    """Compile what has changed since it was last compiled into `cache`, and link all of it into `target`."""
    sources = sorted([*SHIM.glob("*.cpp"), *(csrc / "cuda").glob("*.cu")])
    compiler = find_compiler() or ["g++"]
    command = [*compiler, *FLAGS, *flags, f"-I{csrc / 'include'}"]

    def compile_one(source: Path) -> Path:
        # The text after preprocessing, without the lines that only say where it came from.
        preprocessed = subprocess.run(
            [*command, "-E", "-P", "-x", "c++", source], check=True, capture_output=True
        )
        key = hashlib.sha256(repr(flags).encode() + preprocessed.stdout).hexdigest()[:20]
        compiled = cache / f"{source.stem}-{key}.o"
        if not compiled.exists():
            unfinished = compiled.with_suffix(f".{os.getpid()}")
            subprocess.run([*command, "-x", "c++", "-c", source, "-o", unfinished], check=True)
            unfinished.rename(compiled)
        return compiled

    cache.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(os.cpu_count()) as workers:
        objects = list(workers.map(compile_one, sources))
    subprocess.run([*compiler, *flags, "-shared", *objects, "-o", target], check=True)


class Shim(CudaLibrary):
    """The library on the host: tensors of the CPU, no stream, and scratch memory full of garbage."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.seed(0)
        self.limit_shared_memory(227 * 1024)

    def run(self, name: str, params: ctypes.Structure, device: torch.device) -> None:
        self.start(name, params, device, 0)

    def allocate(self, size_bytes: int, device: torch.device) -> torch.Tensor:
        return torch.full([size_bytes], 0xFF, dtype=torch.uint8)

    def seed(self, seed: int) -> None:
        """Choose the order in which threads and blocks run."""
        self._functions.emulated_seed(ctypes.c_uint64(seed))

    def limit_shared_memory(self, size_bytes: int) -> None:
        """Be a device whose blocks can have so much."""
        self._functions.emulated_shared_limit(size_bytes)

    def be_of_capability(self, major: int) -> None:
        """Be a device of this major compute capability."""
        self._functions.emulated_capability(major)

    def paged_attention(self, *arguments: object) -> None:
        calls.paged_attention(self, *arguments)  # type: ignore[arg-type]
