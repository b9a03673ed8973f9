"""Chats as requests, and requests as they are sent to an API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from pagedkv.checks import show
from pagedkv.errors import UsageError
from pagedkv.policy.text import Encode
from pagedkv.policy.trace import Request

ANSWERS = {"gpt", "assistant", "model", "chatgpt", "bing", "bard"}
"""Who answers, in the words of the data sets."""


def messages_of(fields: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (role, text) of every message.

    Raises
    ------
    UsageError
        A message is no such thing: then the chat is left out whole, since all later prompts hold it.
    """
    name = "messages" if "messages" in fields else "conversations"
    role_key, text_key = ("role", "content") if name == "messages" else ("from", "value")
    listed = fields[name]
    if not isinstance(listed, list) or not listed:
        raise UsageError(f"{name}: expected a list of messages, got {show(listed)}")
    messages = []
    for number, message in enumerate(listed, 1):
        role = message.get(role_key) if isinstance(message, dict) else None
        text = _text(message.get(text_key)) if isinstance(message, dict) else None
        if not isinstance(role, str) or text is None:
            wanted = f"texts {role_key!r} and {text_key!r}"
            raise UsageError(f"{name}, message {number}: expected {wanted}, got {show(message)}")
        if message.get("tool_calls"):
            text += json.dumps(message["tool_calls"], ensure_ascii=False)
        messages.append((role, text))
    return messages


def _text(content: Any) -> str | None:
    """Return a message's text, of its parts those that are none as JSON; None for what is no content."""
    if content is None:
        return ""  # an answer that only calls tools
    if isinstance(content, list):
        if not all(isinstance(part, dict | str) for part in content):
            return None
        return "".join(map(_part, content))
    return content if isinstance(content, str) else None


def _part(part: Any) -> str:
    text = part if isinstance(part, str) else part.get("text")
    return text if isinstance(text, str) else json.dumps(part, ensure_ascii=False)


def render(fields: dict[str, Any]) -> str:
    """Return tools, system prompt and messages as one text, in the order in which models read them."""
    return f"{_preamble(fields)}{''.join(_said(*message) for message in messages_of(fields))}"


def _preamble(fields: dict[str, Any]) -> str:
    parts = []
    if fields.get("tools"):
        parts.append(_said("tools", json.dumps(fields["tools"], ensure_ascii=False)))
    system = _text(fields.get("system")) if "system" in fields else ""
    if system is None:
        raise UsageError(f"system: expected a text, got {show(fields['system'])}")
    return "".join([*parts, _said("system", system) if system else ""])


def _said(role: str, text: str) -> str:
    return f"<|{role}|>\n{text}\n"


def chat_requests(
    fields: dict[str, Any], encode: Encode, begin_s: float, gap_s: float, salt: str | None
) -> Iterator[Request]:
    """Yield what a chat was: a request for each answer, and one for a last message without answer.

    ``messages`` that end without an answer are one request, as it was sent: its history was asked before.
    """
    messages = messages_of(fields)
    if "messages" in fields and messages[-1][0] not in ANSWERS:
        whole = np.array(encode(render(fields)), np.uint32)
        yield Request(begin_s, len(whole), 0, salt, whole, 1)
        return
    prompt: list[int] = encode(_preamble(fields))
    time_s = begin_s
    for number, (role, text) in enumerate(messages):
        said = encode(_said(role, text))
        is_answer = role in ANSWERS
        if is_answer and prompt:
            yield Request(time_s, len(prompt), len(said), salt, np.array(prompt, np.uint32), 1)
            time_s += gap_s
        prompt = prompt + said
        if number == len(messages) - 1 and not is_answer:
            yield Request(time_s, len(prompt), 0, salt, np.array(prompt, np.uint32), 1)
