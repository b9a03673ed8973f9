"""Chats replayed on an engine: each request when it is due, whether or not the engine keeps up."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import TYPE_CHECKING, NamedTuple

from pagedkv.cli.chats import Chat, Message
from pagedkv.errors import UsageError

if TYPE_CHECKING:
    from pagedkv.runner import Engine, Request, Tokenizer


class Served(NamedTuple):
    """A request that was answered. Seconds count from the start of the replay.

    Attributes
    ----------
    chat, turn : int
        Which chat it was of, and which of its requests.
    due_s : float
        When it arrived. Waits count from here, also where a step was running and nobody looked.
    request : Request
    start_s : float
        The start, on the engine's clock.
    """

    chat: int
    turn: int
    due_s: float
    request: Request
    start_s: float

    @property
    def first_token_s(self) -> float:
        """When its first token came."""
        assert self.request.first_token_s is not None, "it was answered"
        return self.request.first_token_s - self.start_s

    @property
    def time_to_first_token_s(self) -> float:
        """From its arrival."""
        return self.first_token_s - self.due_s

    @property
    def queue_s(self) -> float:
        """From its arrival to the first step that had it."""
        assert self.request.scheduled_s is not None, "it was answered"
        return self.request.scheduled_s - self.start_s - self.due_s

    @property
    def end_s(self) -> float:
        """When it was complete."""
        assert self.request.finished_s is not None, "it was answered"
        return self.request.finished_s - self.start_s


class Outcome(NamedTuple):
    """What came of a replay.

    Attributes
    ----------
    served : list of Served
        In the order of their ends.
    refused : list of str
        Why chats ended early: their next prompt did not fit, say.
    duration_s : float
    """

    served: list[Served]
    refused: list[str]
    duration_s: float


class Replay:
    """Drives an engine through chats.

    Parameters
    ----------
    engine : Engine
    tokenizer : Tokenizer
    chats : sequence of Chat
    arrivals_s : sequence of float
        When each chat's first request is due.
    max_tokens : int
        Of an answer, where the chat says nothing.
    think_s : float
        From an answer to the same chat's next request.
    clock, sleep : callable
        The engine's clock, and how to wait where nothing is to do.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        chats: Sequence[Chat],
        arrivals_s: Sequence[float],
        *,
        max_tokens: int,
        think_s: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._engine, self._tokenizer, self._chats = engine, tokenizer, chats
        self._max_tokens, self._think_s = max_tokens, think_s
        self._clock, self._sleep = clock, sleep
        self._due: list[tuple[float, int, int]] = []  # a heap of (when, chat, turn)
        for index, due_s in enumerate(arrivals_s):
            heappush(self._due, (due_s, index, 0))
        self._running: dict[Request, tuple[float, int, int]] = {}
        self._answers: list[list[str]] = [[] for _ in chats]

    def run(self, advance: Callable[[int], None] = lambda _: None) -> Outcome:
        """Replay everything; `advance` is told of requests that are done with.

        Raises
        ------
        PagedKVError
            Whatever the engine raises of itself.
        """
        start_s = self._clock()
        served: list[Served] = []
        refused: list[str] = []
        while self._due or self._engine.has_work:
            while self._due and self._due[0][0] <= self._clock() - start_s:
                self._submit(*heappop(self._due), refused, advance)
            if not self._engine.has_work:
                if self._due:
                    self._sleep(max(0.0, self._due[0][0] - (self._clock() - start_s)))
                continue
            for request in self._engine.step():
                due_s, chat, turn = self._running.pop(request)
                if request.error is not None:
                    left = self._chats[chat].num_turns - turn
                    refused.append(f"chat {chat + 1}, request {turn + 1}: {request.error}")
                    advance(left)
                    continue
                served.append(Served(chat, turn, due_s, request, start_s))
                self._answers[chat].append(request.text)
                advance(1)
                if turn + 1 < self._chats[chat].num_turns:
                    heappush(self._due, (served[-1].end_s + self._think_s, chat, turn + 1))
        return Outcome(served, refused, self._clock() - start_s)

    def _submit(
        self, due_s: float, index: int, turn: int, refused: list[str], advance: Callable[[int], None]
    ) -> None:
        from pagedkv.runner import SamplingParams

        chat = self._chats[index]
        params = SamplingParams(max_tokens=chat.max_tokens or self._max_tokens)
        try:
            prompt = self._encode(messages_before(chat, turn, self._answers[index]))
            request = self._engine.submit(prompt, params, cache_salt=chat.salt)
        except UsageError as error:  # it outgrew the model's context or the pool: the others go on
            refused.append(f"chat {index + 1}, request {turn + 1}: {error}")
            advance(chat.num_turns - turn)
            return
        self._running[request] = (due_s, index, turn)

    def _encode(self, messages: list[Message]) -> list[int]:
        if self._tokenizer.chat_template is None:
            return self._tokenizer.encode("\n\n".join(message["content"] for message in messages))
        return self._tokenizer.encode_chat(messages)


def messages_before(chat: Chat, turn: int, answers: Sequence[str]) -> list[Message]:
    """Return all that was said up to the user's message number `turn`, which is the last.

    Between two of the user's messages stands what the chat has there, or else the model's answer.
    """
    said: list[Message] = []
    num_asked = 0
    for message in chat.messages:
        if message["role"] == "user":
            if said and said[-1]["role"] == "user":
                said.append({"role": "assistant", "content": answers[num_asked - 1]})
            num_asked += 1
        said.append(message)
        if num_asked > turn:
            break
    return said
