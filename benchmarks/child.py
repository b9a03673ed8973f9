"""The side that asks: a harness as a child process."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import IO

from benchmarks.harness import REPLY, Round

ROOT = Path(__file__).parents[1]

COMMANDS = {
    "pagedkv": "benchmarks.work.rows",
    "pagedkv, 10 million blocks": "benchmarks.work.giant",
    "vLLM": "benchmarks.peers.vllm_manager",
    "SGLang": "benchmarks.peers.sglang_tree",
}
"""The module of each harness of the pool's benchmark."""

ATTENTION_COMMANDS = {
    "pagedkv, attention": "benchmarks.work.attention",
    "vLLM, attention": "benchmarks.peers.vllm_attention",
}
"""The same of attention's."""

ENGINE_COMMANDS = {
    "pagedkv, engine": "benchmarks.work.engine",
    "transformers": "benchmarks.peers.transformers_engine",
    "vLLM, engine": "benchmarks.peers.vllm_engine",
    "llama.cpp": "benchmarks.peers.llamacpp_engine",
}
"""The same of the engines'. transformers is in our own environment."""

ENVIRONMENTS = {
    "vLLM": "vllm",
    "SGLang": "sglang",
    "vLLM, attention": "vllm",
    "vLLM, engine": "vllm",
    "llama.cpp": "llamacpp",
}
"""The folder of each peer's environment, below the one that holds them."""


class NotMeasuredError(Exception):
    """Why a harness has no figures."""


class Child:
    """A harness that gives rounds when asked. It starts when first needed, and anew after it failed."""

    def __init__(self, name: str, python: Path) -> None:
        self.name, self.python = name, python
        self._process: subprocess.Popen[str] | None = None
        self._errors: IO[str] | None = None

    def begin(self, row: str) -> None:
        """Let go of the last row and set up this one, at its first round.

        Raises
        ------
        NotMeasuredError
        """
        if self._process is None:
            self._start()
        self._send(f"begin {row}")

    def round(self) -> Round:
        """Measure one round of the row.

        Raises
        ------
        NotMeasuredError
            When the harness has ended; its last words are the message.
        """
        self._send("round")
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(REPLY):
                samples: Round = json.loads(line.removeprefix(REPLY))
                return samples
        raise self._failure()

    def close(self) -> None:
        """End the process; its input ends, and it has nothing to finish."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None
        if self._errors is not None:
            self._errors.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        if not self.python.exists():
            raise NotMeasuredError(f"there is no {self.python}: run 'make bench-peers'")
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  # close() closes it
        self._process = subprocess.Popen(
            [self.python, "-m", (COMMANDS | ATTENTION_COMMANDS | ENGINE_COMMANDS)[self.name], "--serve"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def _send(self, request: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            print(request, file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise self._failure() from None

    def _failure(self) -> NotMeasuredError:
        """Take leave of a process that has ended."""
        assert self._process is not None
        assert self._errors is not None
        status = self._process.wait()
        self._errors.seek(0)
        said = [line.strip() for line in self._errors if line.strip()]
        self.close()
        return NotMeasuredError(f"{self.name} ended with {status}: {said[-1] if said else 'it said nothing'}")


def make_child(name: str, peers: Path) -> Child:
    """Make a harness: one of ours in this environment, a peer's in its own."""
    if name in ENVIRONMENTS:
        return Child(name, peers.absolute() / ENVIRONMENTS[name] / "bin" / "python")
    return Child(name, Path(sys.executable))
