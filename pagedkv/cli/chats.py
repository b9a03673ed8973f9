"""Chats to replay: read from a file, or made up; and when each arrives."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from importlib.resources import files
from itertools import accumulate
from math import inf, isfinite
from pathlib import Path
from typing import Any, NamedTuple

from pagedkv.checks import show
from pagedkv.errors import UsageError

Message = dict[str, str]

_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "system": "system"}


class Chat(NamedTuple):
    """A conversation. Each message of its user is a request, whose prompt is all that was said before.

    Attributes
    ----------
    messages : tuple of dict
        With ``role`` and ``content``. Where the assistant's are left out, the model's own take their place.
    timestamp_s : float or None
        When it arrives, if the file says so.
    max_tokens : int or None
        The most tokens of each answer; None leaves it to the command.
    salt : str or None
        Cache salt.
    """

    messages: tuple[Message, ...]
    timestamp_s: float | None = None
    max_tokens: int | None = None
    salt: str | None = None

    @property
    def num_turns(self) -> int:
        """How many requests it makes."""
        return sum(message["role"] == "user" for message in self.messages)


def read_chats(path: Path) -> list[Chat]:
    """Read a file of JSON lines: ``{"messages": [{"role": …, "content": …}, …]}``.

    A line may also have ``timestamp`` (seconds), ``max_tokens`` and ``cache_salt``; ShareGPT's
    ``conversations`` with ``from`` and ``value`` will do for messages.

    Raises
    ------
    UsageError
        The file can't be read, holds no chat, or a line is something else.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--chats: expected a text file, got {error}, in {path}") from error
    chats = [_chat_of(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not chats:
        raise UsageError(f"--chats: expected at least one chat, got none, in {path}")
    return chats


def make_chats(
    num_chats: int, *, num_turns: int, num_system_words: int, num_question_words: int, seed: int
) -> list[Chat]:
    """Make chats that share a system message and ask different things, in words of the demo's handbook."""
    words = files("pagedkv.cli").joinpath("handbook.md").read_text(encoding="utf-8").split()
    draw = random.Random(seed)
    # The text goes round when more is asked for than it has.
    system = " ".join(words[i % len(words)] for i in range(num_system_words))
    chats = []
    for _ in range(num_chats):
        messages = [{"role": "system", "content": system}] if system else []
        for _ in range(num_turns):
            question = " ".join(draw.choices(words, k=num_question_words))
            messages.append({"role": "user", "content": f"{question}?"})
        chats.append(Chat(tuple(messages)))
    return chats


def arrival_times(chats: Sequence[Chat], rate: float | None, *, seed: int) -> list[float]:
    """Return when each chat arrives, in seconds from the start.

    Parameters
    ----------
    rate : float or None
        Chats a second on average, by a Poisson process; ``inf`` has all arrive at once. None takes the file's
        timestamps, the first of which is 0.

    Raises
    ------
    UsageError
        The rate is no rate, or a chat has no timestamp.
    """
    if rate is None:
        stamps = [chat.timestamp_s for chat in chats]
        known = [stamp for stamp in stamps if stamp is not None]
        if len(known) < len(stamps):
            number = stamps.index(None) + 1
            raise UsageError(f"--timestamps: expected a timestamp in each chat, got none in chat {number}")
        return [stamp - min(known) for stamp in known]
    if not rate > 0:
        raise UsageError(f"--rate: expected more than 0 chats a second, or inf, got {rate:g}")
    if rate == inf:
        return [0.0] * len(chats)
    draw = random.Random(seed)
    gaps = [draw.expovariate(rate) for _ in chats[1:]]
    return list(accumulate([0.0, *gaps]))


def _chat_of(line: str, where: str) -> Chat:
    try:
        value: Any = json.loads(line)
    except ValueError as error:
        raise UsageError(f"--chats: expected JSON, got {error}, in {where}") from error
    if isinstance(value, list):  # the messages alone
        value = {"messages": value}
    listed = value.get("messages", value.get("conversations")) if isinstance(value, dict) else None
    if not isinstance(listed, list):
        raise UsageError(f"--chats: expected an object with messages, got {show(value)}, in {where}")
    messages = tuple(_message_of(message, where) for message in listed)
    if not any(message["role"] == "user" for message in messages):
        raise UsageError(f"--chats: expected a message of the user, got none, in {where}")
    stamp, most, salt = (value.get(name) for name in ("timestamp", "max_tokens", "cache_salt"))
    if stamp is not None and not (_is_number(stamp) and isfinite(stamp)):
        raise UsageError(f"--chats: expected a timestamp in seconds, got {show(stamp)}, in {where}")
    if most is not None and not (isinstance(most, int) and _is_number(most) and most > 0):
        raise UsageError(f"--chats: expected max_tokens of at least 1, got {show(most)}, in {where}")
    if salt is not None and not (isinstance(salt, str) and salt):
        raise UsageError(f"--chats: expected a cache_salt that is not empty, got {show(salt)}, in {where}")
    return Chat(messages, None if stamp is None else float(stamp), most, salt)


def _message_of(value: Any, where: str) -> Message:
    if isinstance(value, dict):
        source = value.get("from")
        role = _SHAREGPT_ROLES.get(source, source) if isinstance(source, str) else value.get("role")
        content = value.get("value") if source is not None else value.get("content")
        if isinstance(role, str) and isinstance(content, str):
            return {"role": role, "content": content}
    raise UsageError(f"--chats: expected messages with a role and a content, got {show(value)}, in {where}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
