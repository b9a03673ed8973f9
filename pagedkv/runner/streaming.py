"""An answer's text as it comes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pagedkv.errors import UsageError
from pagedkv.runner.sampling import SamplingParams

if TYPE_CHECKING:
    from pagedkv.runner.engine import Engine


class TextIterator(Iterator[str]):
    """Iterates over the text of one answer, stepping the engine for more. Made by `Engine.stream`.

    Attributes
    ----------
    request : Request
    """

    def __init__(
        self, engine: Engine, prompt: str | Sequence[int], params: SamplingParams | None, **options: Any
    ) -> None:
        if isinstance(params, SamplingParams) and params.n > 1:
            raise UsageError(f"n: expected 1, got {params.n}, in Engine.stream")
        self._engine = engine
        self._texts: deque[str] = deque()
        texts = self._texts  # not self: dropping the iterator must end the request
        self.request = engine.submit(prompt, params, on_token=lambda _, text: texts.append(text), **options)

    def __next__(self) -> str:
        """Return the next piece of text, never an empty one.

        Raises
        ------
        StopIteration
        Exception
            What the request failed by.
        """
        while True:
            while self._texts:
                if text := self._texts.popleft():
                    return text
            if self.request.is_finished:
                if self.request.error is not None:
                    raise self.request.error
                raise StopIteration
            self._engine.step()

    def close(self) -> None:
        """Abort the request unless it is finished."""
        self._engine.abort(self.request)

    def __enter__(self) -> TextIterator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "request"):
            # Not now: the garbage collector may have come in the middle of a step.
            self._engine.abort_later(self.request)
