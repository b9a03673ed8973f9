"""The prompts that every harness sends: the same tokens for the same name, whoever asks."""

from __future__ import annotations

import random

NUM_TOKENS = 10_000
"""Of a long prompt."""

NUM_SERVED_TOKENS = 2_000
"""Of the prompts that are served by the hundred."""

NUM_HEADS, NUM_HEAD_TOKENS = 16, 1_000
"""Prefixes that such prompts share, and their length."""

BLOCK_SIZE = 16
VOCABULARY = range(128_000)

SERVING_BLOCKS, NUM_RUNNING = 8_192, 32
"""The pool that serves them, and how many are there at a time."""

NUM_SERVED_TOGETHER, BATCHES_A_ROUND = 8, 8
"""Prompts over which a sample is the mean: few, so that a median leaves out those that were interrupted."""

DECODING_BLOCKS, NUM_DECODING, STEPS_PER_SAMPLE = 65_536, 256, 16
"""The pool of the decode step, its sequences, and the steps in which each of them fills one block."""

SHORT_PATH_TOKENS = 100
"""What each request adds to a path that many requests built."""

NUM_WAITING = 1_024
"""Requests in a waiting queue."""


class Prompts:
    """Prompts that never repeat, as lists."""

    def __init__(self, name: str) -> None:
        self._random = random.Random(name)
        self._turn = 0

    def draw(self, num_tokens: int) -> list[int]:
        """Tokens that no other prompt has."""
        return self._random.choices(VOCABULARY, k=num_tokens)

    def heads(self, num_heads: int = NUM_HEADS) -> list[list[int]]:
        """Prefixes to share."""
        return [self.draw(NUM_HEAD_TOKENS) for _ in range(num_heads)]

    def served(self, heads: list[list[int]], num_prompts: int) -> list[list[int]]:
        """Prompts of 2,000 tokens, each with the head whose turn it is; without heads they share nothing."""
        if not heads:
            return [self.draw(NUM_SERVED_TOKENS) for _ in range(num_prompts)]
        num_own = NUM_SERVED_TOKENS - NUM_HEAD_TOKENS
        first, self._turn = self._turn, self._turn + num_prompts
        return [heads[i % len(heads)] + self.draw(num_own) for i in range(first, first + num_prompts)]
