"""The processes that compute one model together, over torch.distributed: gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from pagedkv.checks import show
from pagedkv.errors import RankError, StateError, UsageError

# A process waits for the next step as long as no request comes; within a step, nobody is that slow.
_IDLE = timedelta(days=365)
_STEP = timedelta(minutes=10)
_FAILURE = "failure"


class Ranks:
    """One process's view of all of them. Rank 0 decides; the others do what it tells them.

    Use it in a ``with`` statement: at its end, rank 0 tells the others to end too, or why it failed.

    Attributes
    ----------
    rank, size : int
    device : torch.device
        Where this process computes.
    """

    def __init__(self, store: Store, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, size, device
        self._store = PrefixStore("pagedkv", store)
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_STEP)
        # What to do next goes over a group of its own: it may be long in coming, and is never on a GPU.
        self._control = dist.new_group(backend="gloo", timeout=_IDLE)
        self._is_broken = False

    @classmethod
    def from_environment(cls, device: str = "cpu") -> Ranks | None:
        """Join the processes that torchrun has started; None where there is only this one.

        With the device "cuda", each takes the GPU of its local rank.

        Raises
        ------
        UsageError
            Another than "cpu" or "cuda" was asked for.
        RankError
            The others are not there.
        """
        if int(os.environ.get("WORLD_SIZE", "1")) < 2:
            return None
        if device not in ("cpu", "cuda"):
            raise UsageError(f"device: expected 'cpu' or 'cuda' for several processes, got {show(device)}")
        where = torch.device(device)
        if where.type == "cuda":
            where = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(where)
        try:
            store, rank, size = next(iter(rendezvous("env://", timeout=_STEP)))
            return cls(store, rank, size, where)
        except (RuntimeError, ValueError) as error:
            raise RankError(f"processes: expected all to join, got {_first_line(error)}") from error

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        """Let the others end with us; they raise RankError if `error` is one."""
        try:
            if error is not None:
                self.report(error)
            if self.rank == 0 and not self._is_broken:
                self.send(None if error is None else f"rank 0 failed: {_first_line(error)}")
        except (RankError, RuntimeError):
            pass  # they have ended already
        finally:
            # NCCL would wait for what will never come; gloo's threads must end before the process does.
            is_stuck = self._is_broken and self.device.type == "cuda"
            dist.destroy_process_group(self._control if is_stuck else None)

    def send(self, command: Any) -> None:
        """From rank 0: tell the others what comes next. None is the end, a text the end with its reason."""
        assert self.rank == 0
        with self.together():
            dist.broadcast_object_list([command], src=0, group=self._control)

    def receive(self) -> Any:
        """On the others: wait for what comes next; None is the end.

        Raises
        ------
        RankError
            Rank 0 has failed.
        """
        assert self.rank != 0
        command = [None]
        with self.together():
            dist.broadcast_object_list(command, src=0, group=self._control)
        if isinstance(command[0], str):
            raise RankError(f"processes: expected all to go on, got an end: {command[0]}")
        return command[0]

    def broadcast(self, tensor: Tensor) -> None:
        """Give every process rank 0's numbers. Modifies `tensor` on the others."""
        dist.broadcast(tensor, src=0)

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over all processes, of x's dtype; the same bits on each. May modify `x`."""
        total = x.float() if x.device.type == "cpu" else x  # gloo has no sum of bfloat16
        dist.all_reduce(total)
        return total.to(x.dtype)

    def gather(self, part: Tensor, num_columns: int) -> Tensor:
        """Put parts [n, columns] side by side on rank 0: [n, num_columns]; on the others, return `part`.

        Parts are as wide as `Shard` cuts them.
        """
        widest = -(-num_columns // self.size)
        padded = torch.nn.functional.pad(part, (0, widest - part.shape[1])).contiguous()
        parts = [torch.empty_like(padded) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(padded, parts, dst=0)
        if parts is None:
            return part
        num_wide = num_columns - (widest - 1) * self.size  # the others are a column narrower
        cut = [each if rank < num_wide else each[:, : widest - 1] for rank, each in enumerate(parts)]
        return torch.cat(cut, dim=1)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run what all processes must do at once: whatever goes wrong in it leaves them out of step for good.

        Raises
        ------
        StateError
            Something went wrong before.
        RankError
            Another process has failed.
        """
        if self._is_broken:
            raise StateError("processes: expected all of them in step, got a failure in an earlier step")
        try:
            yield
        except BaseException as error:
            self._is_broken = True
            reason = self._failure_elsewhere()
            if reason is not None and isinstance(error, RuntimeError):
                raise RankError(f"processes: expected all to go on, got a failure of {reason}") from error
            if isinstance(error, dist.DistBackendError | dist.DistNetworkError) or _is_lost(error):
                raise RankError(f"processes: expected all to go on, got {_first_line(error)}") from error
            self.report(error)
            raise

    def report(self, error: BaseException) -> None:
        """Let the others know why this process fails. The first to fail is heard."""
        if isinstance(error, RankError):
            return
        with suppress(RuntimeError):  # where rank 0 kept the store, it ended with rank 0
            self._store.compare_set(_FAILURE, "", f"rank {self.rank}: {_first_line(error)}")

    def _failure_elsewhere(self) -> str | None:
        try:
            if not self._store.check([_FAILURE]):
                return None
            reason = self._store.get(_FAILURE).decode()
        except RuntimeError:
            return None
        return None if reason.startswith(f"rank {self.rank}:") else reason


def _is_lost(error: BaseException) -> bool:
    """Say whether gloo complains of a process that has ended; it raises nothing of its own kind."""
    return isinstance(error, RuntimeError) and any(
        sign in str(error) for sign in ("gloo", "Connection", "closed by peer", "timed out", "Timed out")
    )


def _first_line(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
