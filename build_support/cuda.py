"""Compiles csrc/cuda into `libpagedkv_cuda.so`, a plain shared library, with whatever nvcc there is.

The library links the CUDA run time statically and knows neither Python nor torch, so one build serves every
version of both and loads on a machine without a driver.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from build_support.switches import BuildError, read_flag

DEFAULT_ARCHS = "80,90+PTX"
MIN_ARCH = 80
"""Older devices lack the asynchronous copies and the products that the kernels are made of."""
LIBRARY_NAME = "libpagedkv_cuda.so"
# a * b + c is rounded twice unless the source says fmaf: kernels that share a function share its bits.
FLAGS = ("-O3", "-std=c++20", "-fmad=false", "-Icsrc/include", "-Xcompiler=-fPIC,-fvisibility=hidden")
Say = Callable[[str], None]


def find_nvcc() -> Path | None:
    """Look for an nvcc in CUDA_HOME, CUDA_PATH and PATH, in this order."""
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    search_path = os.pathsep.join([*(str(Path(home, "bin")) for home in homes), os.environ.get("PATH", "")])
    found = shutil.which("nvcc", path=search_path)
    # Resolved, since nvcc finds its toolkit relative to where it really lies.
    return Path(found).resolve() if found else None


def parse_archs(text: str) -> list[str]:
    """Split `80, 90a, 100+PTX` into its entries."""
    archs = [arch for arch in re.split(r"[,;\s]+", text) if arch]
    if not archs or not all(re.fullmatch(r"[1-9]\d{1,2}[af]?(\+PTX)?", arch) for arch in archs):
        raise BuildError(f"PAGEDKV_CUDA_ARCHS: expected a list such as 80,90a,100+PTX, got {text!r}")
    return archs


def gencode_flags(archs: list[str]) -> list[str]:
    """Turn architectures into nvcc's flags: machine code for each, and PTX where asked for."""
    flags = []
    for arch in archs:
        number = arch.removesuffix("+PTX")
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if arch.endswith("+PTX"):
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags


def visible_archs() -> str:
    """Ask nvidia-smi for the architectures of this machine's GPUs; empty when there are none."""
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    return ",".join(sorted({major + minor for major, minor in re.findall(r"(\d+)\.(\d)", answer)}, key=int))


def split_by_support(archs: list[str], supported: str) -> tuple[list[str], list[str]]:
    """Part the architectures that nvcc names and that the kernels run on from the others."""
    numbers = {number for number in re.findall(r"compute_(\d+)", supported) if int(number) >= MIN_ARCH}
    known = [arch for arch in archs if re.sub(r"\D", "", arch) in numbers]
    return known, [arch for arch in archs if arch not in known]


def object_in(folder: Path, source: Path) -> Path:
    """Where the object of a source is put."""
    return folder / f"{source.stem}.o"


def compile_sources(command: list[str], sources: list[Path], folder: Path, say: Say) -> None:
    """Compile the sources side by side, as many at once as there are cores."""

    def compile_one(source: Path) -> None:
        one = [*command, "-c", str(source), "-o", str(object_in(folder, source))]
        say("CUDA: " + " ".join(one))
        subprocess.run(one, check=True)

    with ThreadPoolExecutor(os.cpu_count()) as workers:
        list(workers.map(compile_one, sources))  # a list, so that a failure is raised here


def compile_library(nvcc: Path, archs: list[str], sources: list[Path], target: Path, say: Say) -> None:
    """Run nvcc; raise BuildError when it can't be done."""
    try:
        answer = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=True)
        known, unknown = split_by_support(archs, answer.stdout)
        for arch in unknown:
            say(f"CUDA: architecture {arch} is older than {MIN_ARCH} or unknown to {nvcc}; it is left out")
        if not known:
            raise BuildError(
                f"all of the architectures {', '.join(archs)} are older than {MIN_ARCH} or unknown to {nvcc}"
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            compile_sources([str(nvcc), *FLAGS, *gencode_flags(known)], sources, Path(folder), say)
            objects = [str(object_in(Path(folder), source)) for source in sources]
            link = [
                str(nvcc),
                "-cudart=static",
                "-shared",
                *gencode_flags(known),
                *objects,
                "-o",
                str(target),
            ]
            subprocess.run(link, check=True)
    except subprocess.CalledProcessError as error:
        raise BuildError(f"{nvcc} failed with exit code {error.returncode}; its messages are above") from None
    except OSError as error:
        raise BuildError(f"{nvcc} can't be run: {error}") from None


def build_cuda(target: Path, say: Say) -> bool:
    """Compile `target` if PAGEDKV_BUILD_CUDA and this machine allow it; say why when not.

    Modifies `target`: a library left there by an earlier build is removed first.

    Returns
    -------
    bool
        Whether the library was built. A machine that can't build it ends the build only when
        PAGEDKV_BUILD_CUDA is 1; a switch with a bad value always does.
    """
    wanted = read_flag("PAGEDKV_BUILD_CUDA")
    archs = parse_archs(os.environ.get("PAGEDKV_CUDA_ARCHS") or visible_archs() or DEFAULT_ARCHS)
    target.unlink(missing_ok=True)
    if wanted is False:
        say("CUDA: switched off by PAGEDKV_BUILD_CUDA=0")
        return False
    sources = sorted(Path("csrc/cuda").glob("*.cu"))
    nvcc = find_nvcc()
    try:
        if not sources:
            raise BuildError("there are no sources in csrc/cuda: this version has no CUDA kernels")
        if nvcc is None:
            raise BuildError("no nvcc in CUDA_HOME, CUDA_PATH or PATH")
        compile_library(nvcc, archs, sources, target, say)
    except BuildError as reason:
        if wanted:
            raise BuildError(f"PAGEDKV_BUILD_CUDA=1, but the CUDA library can't be built: {reason}") from None
        say(f"CUDA: not built: {reason}")
        return False
    return True
