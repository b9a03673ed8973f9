"""What a prompt cost: tokens computed, read from the cache and written to it; and as others would bill it."""

from __future__ import annotations

from typing import NamedTuple, TypedDict

from pagedkv.checks import check_int, check_number
from pagedkv.retention import Breakpoint

SHORT_TTL_S = 300.0
"""Providers that price a write by its time know two: up to five minutes, and longer."""


class OpenAIDetails(TypedDict):
    """Part of :class:`OpenAIUsage`."""

    cached_tokens: int


class OpenAIUsage(TypedDict):
    """The prompt's fields of `usage` in OpenAI's answers; cached tokens are among the prompt's."""

    prompt_tokens: int
    prompt_tokens_details: OpenAIDetails


class AnthropicCacheCreation(TypedDict):
    """Part of :class:`AnthropicUsage`."""

    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class AnthropicUsage(TypedDict):
    """The prompt's fields of `usage` in Anthropic's answers; the first three sum to the prompt."""

    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    cache_creation: AnthropicCacheCreation


class Usage(NamedTuple):
    """The tokens of a prompt, each counted once.

    Attributes
    ----------
    input : int
        Computed, and not written for a breakpoint.
    cache_read : int
        Found in the cache.
    cache_write_by_ttl : dict of float to int
        Computed, and kept for a breakpoint: tokens by its seconds. Empty without breakpoints.
    """

    input: int
    cache_read: int
    cache_write_by_ttl: dict[float, int]

    def __add__(self, other: Usage) -> Usage:  # type: ignore[override]  # a sum, where tuples would be joined
        """Return both together: ``sum(usages, Usage(0, 0, {}))`` is what many prompts cost."""
        if not isinstance(other, Usage):
            return NotImplemented
        ttls = {**self.cache_write_by_ttl, **other.cache_write_by_ttl}
        writes = {
            ttl_s: self.cache_write_by_ttl.get(ttl_s, 0) + other.cache_write_by_ttl.get(ttl_s, 0)
            for ttl_s in ttls
        }
        return Usage(self.input + other.input, self.cache_read + other.cache_read, writes)

    @property
    def cache_write(self) -> int:
        """Tokens kept for any breakpoint."""
        return sum(self.cache_write_by_ttl.values())

    @property
    def num_tokens(self) -> int:
        """All tokens of the prompt."""
        return self.input + self.cache_read + self.cache_write

    def round_down(self, *, min_tokens: int, step_tokens: int = 1) -> Usage:
        """Return the usage under rules that know short and odd lengths no better than no reuse.

        What they take away counts as input, so the sum stays.

        Parameters
        ----------
        min_tokens : int
            A part that ends before so many tokens of the prompt counts as input. The parts are, in the order
            of the prompt: what was read, then the writes, longest time first.
        step_tokens : int
            Tokens read count in multiples of this.
        """
        min_tokens = check_int("min_tokens", min_tokens, 0, 2**62)
        step_tokens = check_int("step_tokens", step_tokens, 1, 2**62)
        cache_read = self.cache_read // step_tokens * step_tokens
        if cache_read < min_tokens:
            cache_read = 0
        end = self.cache_read
        writes: dict[float, int] = {}
        for ttl_s, num_tokens in sorted(self.cache_write_by_ttl.items(), reverse=True):
            end += num_tokens
            if end >= min_tokens:
                writes[ttl_s] = num_tokens
        return Usage(self.num_tokens - cache_read - sum(writes.values()), cache_read, writes)

    def openai(self, *, min_tokens: int = 1024, step_tokens: int = 128) -> OpenAIUsage:
        """Report it in OpenAI's fields, by default under its rules: 1,024 tokens or more, in steps of 128.

        ``min_tokens=0, step_tokens=1`` reports what really was reused.
        """
        cached_tokens = self.round_down(min_tokens=min_tokens, step_tokens=step_tokens).cache_read
        return {"prompt_tokens": self.num_tokens, "prompt_tokens_details": {"cached_tokens": cached_tokens}}

    def anthropic(self, *, min_tokens: int = 1024) -> AnthropicUsage:
        """Report it in the fields of Anthropic, whose smallest cached prefix depends on the model.

        ``min_tokens=0`` reports what really was reused.
        """
        usage = self.round_down(min_tokens=min_tokens)
        short, long = usage._writes()
        return {
            "input_tokens": usage.input,
            "cache_read_input_tokens": usage.cache_read,
            "cache_creation_input_tokens": short + long,
            "cache_creation": {"ephemeral_5m_input_tokens": short, "ephemeral_1h_input_tokens": long},
        }

    def cost(
        self,
        price_per_million: float,
        *,
        read_factor: float = 0.1,
        short_write_factor: float = 1.25,
        long_write_factor: float = 2.0,
    ) -> float:
        """Return the price of the prompt, in the unit of `price_per_million`.

        Parameters
        ----------
        price_per_million : float
            Of 1,000,000 input tokens.
        read_factor, short_write_factor, long_write_factor : float
            What a token costs, as a multiple of an input token, that was read, written for up to five
            minutes, written for longer.
        """
        price = check_number("price_per_million", price_per_million)
        short, long = self._writes()
        num_input_tokens = (
            self.input
            + self.cache_read * check_number("read_factor", read_factor)
            + short * check_number("short_write_factor", short_write_factor)
            + long * check_number("long_write_factor", long_write_factor)
        )
        return num_input_tokens * price / 1_000_000

    def _writes(self) -> tuple[int, int]:
        """Tokens written for up to five minutes, and for longer."""
        short = sum(n for ttl_s, n in self.cache_write_by_ttl.items() if ttl_s <= SHORT_TTL_S)
        return short, self.cache_write - short


def prompt_usage(
    num_tokens: int,
    num_hit: int,
    num_with_kv: int,
    num_publishable: int,
    breakpoints: tuple[Breakpoint, ...],
    block_size: int,
) -> Usage:
    """Count the tokens of a prompt.

    Parameters
    ----------
    num_tokens : int
    num_hit : int
        Tokens that were found and need no computation.
    num_with_kv : int
        Tokens whose KV was found: one more after a hit of all there is, whose last token is computed all the
        same.
    num_publishable : int
        Leading tokens that may be published; no others can be written.
    breakpoints : tuple of Breakpoint
        In the order of the prompt.
    block_size : int
    """
    writes: dict[float, int] = {}
    end = num_with_kv
    for position, ttl_s in breakpoints:
        block_end = min(position, num_publishable) // block_size * block_size
        if block_end > end:
            writes[ttl_s] = writes.get(ttl_s, 0) + block_end - end
            end = block_end
    return Usage(num_tokens - num_hit - sum(writes.values()), num_hit, writes)
