"""Compiles `pagedkv._core` and, where an nvcc is found, `libpagedkv_cuda.so`.

Switches, all read from the environment:

===================  ================================================================================
PAGEDKV_BUILD_CUDA   0: never; 1: or the install fails; unset: if an nvcc is found and works
PAGEDKV_CUDA_ARCHS   such as `80,90a,100+PTX`; unset: those of the visible GPUs, else `80,90+PTX`
PAGEDKV_SANITIZE     such as `address,undefined` or `thread`
PAGEDKV_DEBUG_BUILD  1: no optimisation, debug symbols, assertions on
===================  ================================================================================
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).parent))  # build front ends do not put it there
from build_support.cuda import LIBRARY_NAME, build_cuda
from build_support.switches import read_flag, read_sanitizers

# GCC's own header of AVX-512 makes it warn of something uninitialised.
AVX512_FLAGS = [
    *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"),
    *("-Wno-maybe-uninitialized", "-Wno-uninitialized"),
]
ISA_FLAGS = {
    "kernels_avx2.cpp": ["-mavx2", "-mfma", "-mf16c"],
    "kernels_avx512.cpp": AVX512_FLAGS,
    "kernels_avx512_bf16.cpp": [*AVX512_FLAGS, "-mavx512bf16"],
    "kernels_amx.cpp": AVX512_FLAGS,
}
"""What single files need on x86-64. Their code is entered only on a processor that has the instructions."""


def file_flags(source: str) -> list[str]:
    """Return the flags of one file."""
    is_x86 = sysconfig.get_platform().endswith(("x86_64", "amd64"))
    return ISA_FLAGS.get(Path(source).name, []) if is_x86 else []


def core_extension() -> Extension:
    """Describe `pagedkv._core`: our sources plus nanobind's own, which need no library at run time."""
    import nanobind

    nanobind_dir = Path(nanobind.source_dir()).parent
    sources = [
        source
        for folder in ("core", "core/policies", "cpu", "bindings")
        for source in Path("csrc", folder).glob("*.cpp")
    ]
    sanitizers = [f"-fsanitize={name}" for name in read_sanitizers()]
    if sanitizers:
        # A finding must fail the test that caused it, so the process ends there instead of going on.
        mode = ["-O1", "-g", "-UNDEBUG", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all"]
    elif read_flag("PAGEDKV_DEBUG_BUILD"):
        mode = ["-O0", "-g", "-UNDEBUG"]
    else:
        mode = ["-O3", "-g0", "-DNDEBUG"]
    return Extension(
        "pagedkv._core",
        sources=sorted(map(str, sources)),
        depends=sorted(map(str, Path("csrc").rglob("*.h"))),
        include_dirs=[
            "csrc/include",
            str(nanobind_dir / "include"),
            str(nanobind_dir / "src"),
            str(nanobind_dir / "ext/robin_map/include"),
        ],
        # Products and sums are contracted where the source says so: a kernel's results must not depend on the
        # shape of the loop around them.
        extra_compile_args=[
            "-std=c++20",
            "-fvisibility=hidden",
            "-ffp-contract=off",
            "-Wall",
            "-Wextra",
            *mode,
            *sanitizers,
        ],
        extra_link_args=sanitizers,
        language="c++",
    )


class BuildExt(build_ext):
    """Compile the sources side by side, and the CUDA library after them."""

    def build_extensions(self) -> None:
        """Compile as many sources at once as there are cores, each with its own flags."""
        compile_in_turn = self.compiler.compile

        def compile_one(source: str, options: dict[str, Any]) -> list[str]:
            flags = [*(options.get("extra_postargs") or []), *file_flags(source)]
            return compile_in_turn([source], **{**options, "extra_postargs": flags})

        def compile_side_by_side(sources: list[str], **options: Any) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as workers:
                objects = workers.map(lambda source: compile_one(source, options), sources)
                return [name for names in objects for name in names]

        self.compiler.compile = compile_side_by_side
        super().build_extensions()

    def run(self) -> None:
        """Build both libraries; an editable install gets them in the source tree."""
        super().run()
        library = Path(self.build_lib, "pagedkv", LIBRARY_NAME)
        in_source_tree = Path("pagedkv", LIBRARY_NAME)
        if self.inplace:
            in_source_tree.unlink(missing_ok=True)
        if build_cuda(library, say=self.warn) and self.inplace:
            shutil.copy2(library, in_source_tree)


def build_folder() -> str:
    """Keep objects that were compiled with different flags apart."""
    variant = "-".join(read_sanitizers()) or ("debug" if read_flag("PAGEDKV_DEBUG_BUILD") else "release")
    return f"build/{variant}"


if __name__ == "__main__":
    setup(
        ext_modules=[core_extension()],
        cmdclass={"build_ext": BuildExt},
        options={"build": {"build_base": build_folder()}},
    )
