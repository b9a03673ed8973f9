"""`libpagedkv_cuda.so`: found, opened, and checked against what this version expects of it."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from pagedkv.errors import BackendUnavailableError, UsageError
from pagedkv.kernels.cuda import abi

PATH = Path(__file__).parents[2] / "libpagedkv_cuda.so"
_OPS = (
    "write_kv",
    "paged_attention",
    "copy_blocks",
    "gather_blocks",
    "scatter_blocks",
    "merge_attention_states",
)
_OPS_WITH_WORKSPACE = ("paged_attention", "copy_blocks")


class CudaLibrary:
    """The functions of a library at `path`.

    Raises
    ------
    BackendUnavailableError
        It is not there, can't be opened, or was built from other sources.
    """

    def __init__(self, path: Path = PATH) -> None:
        if not path.exists():
            raise BackendUnavailableError(
                f"backend: expected {path.name} for 'cuda', got an install without it; install pagedkv where "
                "there is an nvcc, or with PAGEDKV_BUILD_CUDA=1 to see what is missing"
            )
        try:
            self._functions = ctypes.CDLL(str(path))
        except OSError as error:
            raise BackendUnavailableError(f"backend: expected {path.name} to load, got: {error}") from error
        self._check_abi(path)
        self._functions.pagedkv_cuda_error.restype = ctypes.c_char_p
        for name in _OPS_WITH_WORKSPACE:
            workspace_bytes = getattr(self._functions, f"pagedkv_cuda_{name}_workspace_bytes")
            workspace_bytes.restype = ctypes.c_int64
            workspace_bytes.argtypes = [ctypes.c_void_p]
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        for name in _OPS:
            given = [pointer, pointer, size] if name in _OPS_WITH_WORKSPACE else [pointer]
            getattr(self._functions, f"pagedkv_cuda_{name}").argtypes = [*given, pointer]

    def why_unavailable(self) -> str | None:
        """Say why no device can be used; None when one can."""
        code = self._functions.pagedkv_cuda_probe()
        return None if code == 0 else self._explain(code)

    def run(self, name: str, params: ctypes.Structure, device: torch.device) -> None:
        """Start an operation's kernels on the current stream of the device.

        Raises
        ------
        UsageError
            There is no kernel for such sizes.
        RuntimeError
            The device failed, in this call or in an earlier one.
        """
        with torch.cuda.device(device):
            self.start(name, params, device, torch.cuda.current_stream(device).cuda_stream)

    def start(self, name: str, params: ctypes.Structure, device: torch.device, stream: int) -> None:
        """As `run`, on a stream of the device that is the current one."""
        address = ctypes.addressof(params)
        function = getattr(self._functions, f"pagedkv_cuda_{name}")
        if name in _OPS_WITH_WORKSPACE:
            size = getattr(self._functions, f"pagedkv_cuda_{name}_workspace_bytes")(address)
            # Freed at the end, but in the order of the stream: what runs on it later may have it then.
            workspace = self.allocate(size, device)
            code = function(address, workspace.data_ptr(), size, stream)
        else:
            code = function(address, stream)
        self._raise(name, code)

    def allocate(self, size_bytes: int, device: torch.device) -> torch.Tensor:
        """Get scratch memory, aligned to 16 bytes."""
        return torch.empty(size_bytes, dtype=torch.uint8, device=device)

    def _raise(self, name: str, code: int) -> None:
        if code < 0:
            raise UsageError(
                f"sizes: expected some that the backend 'cuda' takes, got: {self._explain(code)}, in {name}"
            )
        if code > 0:
            raise RuntimeError(f"CUDA: {self._explain(code)}, in {name}")

    def _explain(self, code: int) -> str:
        text: bytes = self._functions.pagedkv_cuda_error(code)
        return text.decode()

    def _check_abi(self, path: Path) -> None:
        expected = abi.numbers()
        got = (ctypes.c_int64 * len(expected))()
        try:
            count = self._functions.pagedkv_cuda_abi(got, len(got))
        except AttributeError as error:
            raise BackendUnavailableError(f"backend: expected pagedkv's {path.name}, got: {error}") from error
        if count != len(expected) or list(got) != expected:
            raise BackendUnavailableError(
                f"backend: expected {path.name} of this version, got another; install again"
            )
