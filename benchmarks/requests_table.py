"""What the engines are asked, the same for all. Needs nothing but Python."""

from __future__ import annotations

import random

NUM_SHARED, NUM_NEW = 4_000, 64
"""A prefix that was computed before, and what each warm request adds to it."""

NUM_COLD = NUM_SHARED + NUM_NEW
PREFIX_LENGTHS = (512, 1_024, 2_048, 4_096, 7_500)
NUM_LONGEST = 8_000
"""The longest prefix that fits the model's context of 8,192 tokens with a question and an answer."""

NUM_DECODED_FROM = 64
"""Tokens of the prompts of sequences that decode."""
NUM_STEPS = 24
"""Decode steps of which a sample is the mean."""

BATCHES = (1, 8, 32)
NUM_WARM_UPS = 5
CONTEXT_LENGTH = 8_192
VOCABULARY = range(100, 49_000)


class Draw:
    """Prompts that never repeat."""

    def __init__(self, name: str) -> None:
        self._random = random.Random(name)

    def __call__(self, num_tokens: int) -> list[int]:
        """Draw tokens that no other prompt has."""
        return self._random.choices(VOCABULARY, k=num_tokens)
