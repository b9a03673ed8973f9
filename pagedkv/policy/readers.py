"""Traces from files. Every object of a file is read by the rules of the format that its fields tell.

=================  ==============================================================================
fields             format
=================  ==============================================================================
``hash_ids``       Mooncake: ``timestamp`` (ms), ``input_length``, ``output_length``, ids of blocks
``requests``       a coding-agent session: ``block_size``, ``id``, requests: ``t`` (s), ``in``, ``out``
``token_ids``      our own: ``time_s``, ``cache_salt``, ``output_length``
``conversations``  ShareGPT: a list of ``from``, ``value``; each answer is a request
``messages``       chat: a list of ``role``, ``content``; each answer is a request; but one request, as
                   sent to an API (with ``system``, ``tools``), if the last message is no answer
``prompt``         a text, or token ids; ``time_s``, ``cache_salt``, ``output_length`` as above
=================  ==============================================================================
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pagedkv.checks import check_int, check_number, show
from pagedkv.errors import UsageError
from pagedkv.extras import check_salt
from pagedkv.policy.chats import chat_requests
from pagedkv.policy.lines import Entry, read_entries
from pagedkv.policy.text import Encode, WordTokenizer
from pagedkv.policy.trace import BlockNames, Problem, Request, Tokens, Trace, make_trace
from pagedkv.tokens import MAX_TOKEN, as_tokens

MOONCAKE_BLOCK = 512
MAX_LENGTH = 2**31 - 1
MAX_TIME_S = 4e9
"""More than a century: what a pool's clock can show, and seconds since 1970 too."""
THINK_S = 30.0
"""Seconds from a chat's request to its next; chats that do not tell times begin a second apart."""


def read_traces(
    paths: Iterable[Path],
    *,
    strict: bool = False,
    encode: Encode | None = None,
    hash_block_size: int | None = None,
) -> Trace:
    """Read files into one trace, by arrival; a folder stands for the ``.json`` and ``.jsonl`` files in it.

    Ids of blocks are those of their file, or of their session.

    Parameters
    ----------
    paths : iterable of Path
    strict : bool
        Refuse the first entry that can't be read. Else it is left out whole, and told in `Trace.problems`.
    encode : callable, optional
        Turns texts into token ids; by default `WordTokenizer`.
    hash_block_size : int, optional
        Tokens that a hash id stands for. By default the power of two that the lengths of the file agree
        with, 512 before all others.

    Raises
    ------
    UsageError
        A file can't be read, holds no request, or, if `strict`, one that is wrong.
    """
    reader = _Reader(encode or WordTokenizer().encode, hash_block_size)
    requests: list[Request] = []
    problems: list[Problem] = []
    paths = list(paths)
    for path in paths:
        count, before = len(requests), len(problems)
        for file in _files(path):
            for item in reader.read(file):
                if isinstance(item, Request):
                    requests.append(item)
                elif strict:
                    raise UsageError(str(item))
                else:
                    problems.append(item)
        if len(requests) == count:
            why = f"; {problems[before]}" if len(problems) > before else ""
            raise UsageError(f"{path}: expected a request at least, got none{why}")
    return make_trace(", ".join(path.name for path in paths), requests, problems)


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    endings = (".json", ".jsonl", ".json.gz", ".jsonl.gz")
    return sorted(file for file in path.iterdir() if file.name.endswith(endings))


class _Reader:
    def __init__(self, encode: Encode, hash_block_size: int | None) -> None:
        self.encode = encode
        self.names = BlockNames()
        self.hash_block_size = hash_block_size
        self.num_chats = 0

    def read(self, file: Path) -> Iterator[Request | Problem]:
        entries = list(read_entries(file))
        block_size = self.hash_block_size or fitting_block_size(
            item.value for item in entries if isinstance(item, Entry)
        )
        for item in entries:
            if isinstance(item, Problem):
                yield item
                continue
            try:
                yield from self._requests(item, str(file), block_size)
            except UsageError as error:
                yield Problem(item.where, str(error))

    def _requests(self, entry: Entry, scope: str, block_size: int) -> Iterable[Request | Problem]:
        fields = entry.value
        if "hash_ids" in fields:
            # Traces with chats in them, as Bailian's, count seconds where Mooncake's count milliseconds.
            unit_s = 1.0 if "chat_id" in fields else 1e-3
            time_s = _seconds("timestamp", _get(fields, "timestamp"), unit_s)
            lengths = _get(fields, "input_length"), fields.get("output_length", 0)
            return [self._named(time_s, *lengths, fields["hash_ids"], scope, block_size, _salt(fields))]
        if "requests" in fields:
            return self._session(entry)
        if "token_ids" in fields or isinstance(fields.get("prompt"), list):
            name = "token_ids" if "token_ids" in fields else "prompt"
            return [self._tokens(token_ids_of(name, fields[name]), fields)]
        if "conversations" in fields or "messages" in fields:
            time_s, gap_s = self._chat_times(fields)
            return list(chat_requests(fields, self.encode, time_s, gap_s, _salt(fields)))
        if isinstance(fields.get("prompt"), str):
            return [self._tokens(np.array(self.encode(fields["prompt"]), np.uint32), fields)]
        known = "hash_ids, requests, token_ids, conversations, messages or prompt"
        raise UsageError(f"fields: expected {known}, got {show(list(fields))}")

    def _named(
        self, time_s: float, num_in: Any, num_out: Any, ids: Any, scope: str, size: int, salt: str | None
    ) -> Request:
        """Return the request of named blocks; what they leave of the prompt's end is shared with nobody."""
        num_tokens = check_int("input_length", num_in, 1, MAX_LENGTH)
        num_output = check_int("output_length", num_out, 0, MAX_LENGTH)
        if not isinstance(ids, list) or not set(map(type, ids)) <= {int, str}:
            raise UsageError(f"hash_ids: expected a list of integers, got {show(ids)}")
        whole, partial = divmod(num_tokens, size)
        if len(ids) not in (whole, whole + bool(partial)):
            raise UsageError(
                f"hash_ids: expected {whole + bool(partial)} for {num_tokens} tokens in blocks of {size}, "
                f"got {len(ids)}"
            )
        content = self.names.first_tokens(((scope, name) for name in ids), size)
        if len(ids) * size < num_tokens:
            content = np.append(content, np.uint32(self.names.fresh(size)))
        return Request(time_s, num_tokens, num_output, salt, content, size)

    def _session(self, entry: Entry) -> Iterator[Request | Problem]:
        session = entry.value
        size = check_int("block_size", _get(session, "block_size"), 2, 65535)
        listed = session["requests"]
        if not isinstance(listed, list):
            raise UsageError(f"requests: expected a list, got {show(listed)}")
        scope = "global" if session.get("hash_id_scope") == "global" else f"{entry.where} {session.get('id')}"
        for number, fields in enumerate(listed, 1):
            try:
                if not isinstance(fields, dict):
                    raise UsageError(f"expected an object, got {show(fields)}")
                time_s = _seconds("t", _get(fields, "t"))
                lengths = _get(fields, "in"), fields.get("out", 0)
                yield self._named(time_s, *lengths, _get(fields, "hash_ids"), scope, size, None)
            except UsageError as error:
                yield Problem(f"{entry.where}, request {number}", str(error))

    def _tokens(self, tokens: Tokens, fields: dict[str, Any]) -> Request:
        if not len(tokens):
            raise UsageError("prompt: expected at least one token, got none")
        num_output = check_int("output_length", fields.get("output_length", 0), 0, MAX_LENGTH)
        return Request(_time(fields, 0.0), len(tokens), num_output, _salt(fields), tokens, 1)

    def _chat_times(self, fields: dict[str, Any]) -> tuple[float, float]:
        begin_s = _time(fields, float(self.num_chats))
        self.num_chats += 1
        return begin_s, THINK_S


def fitting_block_size(entries: Iterable[dict[str, Any]]) -> int:
    """Return the tokens of a hash id that most lines agree with: 512, or another power of two."""
    sizes: list[int] = [MOONCAKE_BLOCK, *(2**k for k in range(1, 13) if 2**k != MOONCAKE_BLOCK)]
    votes: dict[int, int] = dict.fromkeys(sizes, 0)
    for fields in entries:
        ids, length = fields.get("hash_ids"), fields.get("input_length")
        if isinstance(ids, list) and type(length) is int:
            for size in sizes:
                votes[size] += len(ids) in (length // size, -(-length // size))
    return max(votes, key=lambda size: votes[size])


def token_ids_of(name: str, value: Any) -> Tokens:
    """Return token ids of a JSON list; UsageError names the first that is none."""
    tokens = as_tokens(value, name)
    outside = np.flatnonzero((tokens < 0) | (tokens > MAX_TOKEN))
    if len(outside):
        at = int(outside[0])
        raise UsageError(f"{name}[{at}]: expected an integer from 0 to {MAX_TOKEN}, got {tokens[at]}")
    return tokens.astype(np.uint32)


def _get(fields: dict[str, Any], name: str) -> Any:
    if name not in fields:
        raise UsageError(f"fields: expected {name}, got {show(list(fields))}")
    return fields[name]


def _time(fields: dict[str, Any], default_s: float) -> float:
    """Return the arrival: ``time_s``, or ``timestamp`` in milliseconds, as Mooncake has it."""
    if "time_s" in fields:
        return _seconds("time_s", fields["time_s"])
    if "timestamp" in fields:
        return _seconds("timestamp", fields["timestamp"], 1e-3)
    return default_s


def _seconds(name: str, value: Any, unit_s: float = 1.0) -> float:
    time_s = check_number(name, value) * unit_s
    if time_s > MAX_TIME_S:
        raise UsageError(f"{name}: expected at most {MAX_TIME_S:g} seconds, got {time_s:g}")
    return time_s


def _salt(fields: dict[str, Any]) -> str | None:
    salt = fields.get("cache_salt")
    if salt is not None:
        check_salt(salt)
    return salt
