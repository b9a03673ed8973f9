"""generate_many: a list of prompts, in the order and the batches in which they share most."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tqdm.auto import tqdm

from pagedkv.checks import check_int, show
from pagedkv.contrib.hf.cache import PagedCache
from pagedkv.contrib.hf.probing import cache_argument
from pagedkv.errors import UsageError


class Generated(NamedTuple):
    """What one prompt gave.

    Attributes
    ----------
    token_ids : list of int
        The new tokens; the last one is the end token if there was one.
    text : str or None
        Decoded without special tokens; None without a tokenizer.
    num_prompt_tokens : int
    num_cached_tokens : int
        Tokens of the prompt that did not go through the model for it.
    """

    token_ids: list[int]
    text: str | None
    num_prompt_tokens: int
    num_cached_tokens: int


class Report(NamedTuple):
    """All answers in the order of the prompts, and what the cache spared.

    Attributes
    ----------
    answers : list of Generated
        With ``num_return_sequences``, as many for each prompt, one after the other.
    num_prompt_tokens, num_cached_tokens : int
        Of all prompts.
    seconds : float
        Of the whole call.
    seconds_saved : float
        An estimate: the cached tokens, at the best speed at which this cache's model has read any.
    """

    answers: list[Generated]
    num_prompt_tokens: int
    num_cached_tokens: int
    seconds: float
    seconds_saved: float

    def __str__(self) -> str:
        part = self.num_cached_tokens / max(self.num_prompt_tokens, 1)
        return (
            f"{len(self.answers)} answers in {self.seconds:.1f} s: {self.num_cached_tokens:,} of "
            f"{self.num_prompt_tokens:,} prompt tokens were cached ({part:.0%}), which saved about "
            f"{self.seconds_saved:.1f} s"
        )


def generate_many(
    model: Any,
    prompts: Sequence[Any],
    *,
    cache: PagedCache | None = None,
    memory: int | str = "1GiB",
    tokenizer: Any = None,
    batch_size: int = 8,
    salt: str | bytes | None = None,
    progress: bool = True,
    **options: Any,
) -> Report:
    """Generate for many prompts, those that share a beginning next to each other.

    Prompts that share much of their beginning go into the same batches, by their length; what all of a batch
    begin with is read once for all of them, and what an earlier batch has left is not read again.

    Parameters
    ----------
    model : PreTrainedModel
    prompts : list
        Token ids; or, with a tokenizer, texts or conversations (lists of messages).
    cache : PagedCache, optional
        Of this model. By default one of `memory`, for this call.
    memory : int or str
        Bytes for pages, or text such as "1GiB".
    tokenizer : PreTrainedTokenizer, optional
    batch_size : int
        Prompts that run at a time.
    salt : str or bytes, optional
        As for :meth:`PagedCache.session`.
    progress : bool
        Whether to show a bar.
    **options
        For `generate`.

    Returns
    -------
    Report

    Raises
    ------
    UsageError
    OutOfBlocksError
        When a batch has no room.
    """
    batch_size = check_int("batch_size", batch_size, 1, 2**20)
    rows = [_token_ids(prompt, i, tokenizer) for i, prompt in enumerate(prompts)]
    start = time.perf_counter()
    own = PagedCache.for_model(model, memory=memory) if cache is None else cache
    runner = _Runner(own, tokenizer, salt, options)
    answers: dict[int, list[Generated]] = {}
    try:
        with tqdm(total=len(rows), disable=not progress, unit="prompt") as bar:
            for members in batches(rows, batch_size, own.block_size):
                for i, several in zip(members, runner.run([rows[i] for i in members]), strict=True):
                    answers[i] = several
                bar.update(len(members))
                bar.set_postfix_str(f"{runner.num_cached_tokens:,} tokens cached")
    finally:
        if cache is None:
            own.close()
    num_tokens = sum(map(len, rows))
    return Report(
        [answer for i in range(len(rows)) for answer in answers[i]],
        num_tokens,
        runner.num_cached_tokens,
        time.perf_counter() - start,
        runner.num_cached_tokens * own.token_s if runner.num_cached_tokens else 0.0,
    )


def batches(rows: list[list[int]], batch_size: int, block_size: int) -> Iterator[list[int]]:
    """Cut prompts into batches, each of prompts that share at least a block, and a good part of the shorter.

    Of one family those of about the same length come together: the columns that a batch skips end where the
    cached tokens of its longest prompt do.

    Returns
    -------
    iterator of list of int
        Places in `rows`.
    """
    family: list[int] = []
    for i in sorted(range(len(rows)), key=rows.__getitem__):
        if family:
            last = rows[family[-1]]
            shared = num_shared(last, rows[i])
            if shared < max(block_size, min(len(last), len(rows[i])) // 4):
                yield from _by_length(family, rows, batch_size)
                family = []
        family.append(i)
    yield from _by_length(family, rows, batch_size)


def _by_length(family: list[int], rows: list[list[int]], batch_size: int) -> Iterator[list[int]]:
    family = sorted(family, key=lambda i: len(rows[i]))
    for begin in range(0, len(family), batch_size):
        yield family[begin : begin + batch_size]


def num_shared(first: list[int], second: list[int]) -> int:
    """Return how many tokens two prompts begin with in common."""
    length = min(len(first), len(second))
    differ = np.flatnonzero(np.array(first[:length]) != np.array(second[:length]))
    return int(differ[0]) if len(differ) else length


class _Runner:
    """Batches of token rows, through one cache."""

    def __init__(self, cache: PagedCache, tokenizer: Any, salt: Any, options: dict[str, Any]) -> None:
        self.cache, self.tokenizer, self.salt, self.options = cache, tokenizer, salt, options
        self.argument = cache_argument(cache.model)
        config = cache.model.generation_config
        ends = options.get("eos_token_id", config.eos_token_id)
        self.ends = set(ends if isinstance(ends, list) else [ends])
        pad = options.get("pad_token_id", config.pad_token_id)
        self.pad = next((end for end in self.ends if end is not None), 0) if pad is None else pad
        self.device = cache.model.get_input_embeddings().weight.device
        self.num_cached_tokens = 0

    def run(self, rows: list[list[int]]) -> Iterator[list[Generated]]:
        """Generate for the rows of one batch."""
        shared = self._read_once(rows)
        width = max(map(len, rows))
        ids = torch.full((len(rows), width), self.pad)
        mask = torch.zeros_like(ids)
        for i, row in enumerate(rows):
            ids[i, width - len(row) :] = torch.tensor(row)
            mask[i, width - len(row) :] = 1
        ids, mask = ids.to(self.device), mask.to(self.device)
        with self.cache.session(ids, attention_mask=mask, salt=self.salt) as session:
            past = session.get_seq_length()
            options = {"pad_token_id": self.pad, **self.options, self.argument: session}
            out = self.cache.model.generate(ids, attention_mask=mask, **options)
        out = getattr(out, "sequences", out)[:, width:].tolist()
        times = len(out) // len(rows)
        for i, row in enumerate(rows):
            cached = max(past - (width - len(row)), 0) - (shared if i == 0 else 0)
            self.num_cached_tokens += max(cached, 0)
            several = out[i * times : (i + 1) * times]
            yield [self._answer(tokens, len(row), max(cached, 0)) for tokens in several]

    def _read_once(self, rows: list[list[int]]) -> int:
        """Run what all rows begin with through the model, unless it is cached; return how many tokens."""
        size = self.cache.block_size
        first, last = min(rows), max(rows)  # what these two share, all do
        length = min(num_shared(first, last), min(map(len, rows)) - 1) // size * size
        if len(rows) < 2 or length == 0:
            return 0
        ids = torch.tensor([first[:length]], device=self.device)
        found = self.cache.pool.match(first[:length], cache_salt=self.salt).num_tokens
        if length - found < size:
            return 0
        with self.cache.session(ids, attention_mask=torch.ones_like(ids), salt=self.salt) as session:
            past = session.get_seq_length()
            with torch.no_grad():
                self.cache.model(ids[:, past:], use_cache=True, **{self.argument: session})
        return length - past

    def _answer(self, tokens: list[int], num_prompt_tokens: int, num_cached_tokens: int) -> Generated:
        end = next((i + 1 for i, token in enumerate(tokens) if token in self.ends), len(tokens))
        tokens = tokens[:end]
        text = None if self.tokenizer is None else self.tokenizer.decode(tokens, skip_special_tokens=True)
        return Generated(tokens, text, num_prompt_tokens, num_cached_tokens)


def _token_ids(prompt: Any, number: int, tokenizer: Any) -> list[int]:
    what = f"prompts[{number}]"
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and isinstance(prompt[0], dict)):
        if tokenizer is None:
            raise UsageError(f"{what}: expected token ids, or a tokenizer with it, got {show(prompt)}")
        if isinstance(prompt, str):
            prompt = tokenizer(prompt)["input_ids"]
        else:
            prompt = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
            prompt = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    array = np.asarray(prompt.tolist() if isinstance(prompt, torch.Tensor) else prompt)
    if array.ndim != 1 or len(array) == 0 or array.dtype.kind not in "iu":
        raise UsageError(f"{what}: expected one row of token ids, got {show(prompt)}")
    return [int(token) for token in array]
