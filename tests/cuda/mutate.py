"""Breaks csrc/cuda in one place at a time and shows that the tests notice: `make mutate-cuda`.

A barrier whose removal nobody notices is not needed.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from cuda_shim import ROOT, build
from mutations import LISTED, Mutation, orderings

CACHE = ROOT / "build/cuda-shim"
# Without a mutation it is a fifth of this.
MAX_PROCESSOR_SECONDS = 150
# What sees most in the shortest time comes first.
ATTENTION = ["properties", "attention", "bits"]
TESTS = {
    "write_kv.cu": ["write_kv"],
    "numbers.cuh": ["write_kv"],
    "blocks.cu": ["blocks"],
    "merge_states.cu": ["merging"],
    "state.cuh": ["merging", *ATTENTION],
}


def is_noticed(mutation: Mutation | None, folder: Path) -> bool:
    csrc = folder / "csrc"
    shutil.rmtree(csrc, ignore_errors=True)
    shutil.copytree(ROOT / "csrc", csrc)
    if mutation is not None:
        mutation.apply(csrc / "cuda")
    shim = folder / "libpagedkv_cuda_shim.so"
    # What a mutation leaves unused is no error here, and compiling takes longer than most tests.
    build(shim, csrc=csrc, flags=["-w", "-O1", "-g0"], cache=CACHE)
    names = TESTS.get(mutation.file if mutation else "", ATTENTION)
    tests = [str(ROOT / f"tests/cuda/test_cuda_{name}.py") for name in names]
    options = ["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider"]
    # In a fork, which need not import torch again and may crash or hang.
    child = os.fork()
    if child == 0:
        os.environ.update(PAGEDKV_TEST_SHIM=str(shim), HYPOTHESIS_PROFILE="unshrunk")
        resource.setrlimit(resource.RLIMIT_CPU, (MAX_PROCESSOR_SECONDS, MAX_PROCESSOR_SECONDS))
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        os._exit(pytest.main([*options, *tests]))
    return os.waitpid(child, 0)[1] != 0


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", default=[""], help="what one of the descriptions has to hold")
    only = parser.parse_args().only
    every = (*orderings(ROOT / "csrc/cuda"), *LISTED)
    mutations = [m for m in every if any(part in str(m) for part in only)]
    started = time.monotonic()
    survivors = []
    with tempfile.TemporaryDirectory() as folder:
        if is_noticed(None, Path(folder)):
            say("the tests fail without any mutation")
            return 2
        for mutation in mutations:
            try:
                noticed = is_noticed(mutation, Path(folder))
            except subprocess.CalledProcessError:
                say(f"does not compile, and so shows nothing: {mutation}")
                survivors.append(mutation)
                continue
            say(f"{'noticed ' if noticed else 'SURVIVED'} {mutation}")
            survivors += [] if noticed else [mutation]
    minutes = (time.monotonic() - started) / 60
    say(f"{len(mutations) - len(survivors)} of {len(mutations)} noticed, in {minutes:.1f} minutes")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
