"""The promises of reuse, each checked on what was measured. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

NEAR_TIE = 0.05
"""In bfloat16, logits closer than this may change places when a product has another number of rows."""
MIN_SHARED_TOKENS = 4000
MIN_RATIO = 10.0


class Answer(NamedTuple):
    """One request as it was measured.

    Attributes
    ----------
    user, question, text : str
    num_prompt_tokens, num_cached_tokens : int
    time_to_first_token_s : float
    decode_tokens_per_s : float or None
        None when the answer has one token only.
    token_ids : list of int
        The answer, its end token included.
    top_logits : list of list of (int, float)
        The two best tokens of each step, with their logits, best first.
    """

    user: str
    question: str
    num_prompt_tokens: int
    num_cached_tokens: int
    time_to_first_token_s: float
    decode_tokens_per_s: float | None
    token_ids: list[int]
    top_logits: list[list[tuple[int, float]]]
    text: str


class Waits(NamedTuple):
    """Times to first token of prompts of one length, in seconds."""

    all_cold_s: list[float]
    all_warm_s: list[float]

    @property
    def cold_s(self) -> float:
        """The median of the cold ones."""
        return median(self.all_cold_s)

    @property
    def warm_s(self) -> float:
        """The median of the warm ones."""
        return median(self.all_warm_s)

    @property
    def ratio(self) -> float:
        """How many times longer a cold request waits."""
        return self.cold_s / self.warm_s


class Verdict(NamedTuple):
    """Whether a promise was kept, a sentence that says so, and what else a person should see."""

    holds: bool
    text: str
    notes: tuple[str, ...] = ()


def check_same_answers(
    what: str, expected: Sequence[Answer], got: Sequence[Answer], *, dtype: str
) -> Verdict:
    """Compare token ids: in float32 all must be equal, in bfloat16 those before the first near tie.

    Parameters
    ----------
    what : str
        What is compared, for the sentence: "with reuse and without".
    expected, got : sequence of Answer
        The same questions in the same order.
    """
    broken: list[str] = []
    parted: list[str] = []
    for ours, theirs in zip(expected, got, strict=True):
        step = first_difference(ours.token_ids, theirs.token_ids)
        if step is None:
            continue
        tie = None if dtype == "float32" else first_near_tie(ours, theirs)
        if tie is not None and tie <= step:
            part = f"{ours.user}: the answers part at step {step}"
            parted.append(f"{part}; step {tie} is a near tie: {_logits_at(tie, ours, theirs)}")
        else:
            broken.append(f"{ours.user}: step {step} differs: {_logits_at(step, ours, theirs)}")
    if broken:
        return Verdict(
            False, f"answers {what}: expected equal tokens, got different ones", (*broken, *parted)
        )
    extent = "up to the first near tie" if parted else "token for token"
    return Verdict(True, f"answers {what} are equal, {extent}", tuple(parted))


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Return the first index at which two lists differ, their ends included; None when they are equal."""
    for step, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return step
    return None if len(left) == len(right) else min(len(left), len(right))


def first_near_tie(*answers: Answer) -> int | None:
    """Return the first step at which the two best logits of any answer lie within `NEAR_TIE`."""
    steps = [
        step
        for answer in answers
        for step, best in enumerate(answer.top_logits)
        if len(best) > 1 and best[0][1] - best[1][1] <= NEAR_TIE
    ]
    return min(steps, default=None)


def check_reuse(warm: Sequence[Answer], num_shared_tokens: int) -> Verdict:
    """Hold every later request to have found all that it shares with the first."""
    least = min(answer.num_cached_tokens for answer in warm)
    if num_shared_tokens < MIN_SHARED_TOKENS:
        return Verdict(
            False, f"shared prefix: expected at least {MIN_SHARED_TOKENS:,} tokens, got {num_shared_tokens:,}"
        )
    if least < num_shared_tokens:
        return Verdict(
            False, f"reuse: expected {num_shared_tokens:,} cached tokens for later users, got {least:,}"
        )
    return Verdict(True, f"every later user reused all {num_shared_tokens:,} tokens of the shared prefix")


def check_isolation(salted: Sequence[Answer]) -> Verdict:
    """Hold tenants with salts of their own to have found nothing of one another."""
    num_cached = sum(answer.num_cached_tokens for answer in salted)
    if num_cached:
        return Verdict(False, f"tenants: expected 0 tokens shared between salts, got {num_cached:,}")
    return Verdict(True, "tenants with a salt each shared 0 tokens, although they sent the same text")


def wait_cold_and_warm(shared: Sequence[Answer], uncached: Sequence[Answer]) -> Waits:
    """Sort the times to first token: only the first user's with reuse, and all without a cache, are cold."""
    first, *later = shared
    cold = [answer.time_to_first_token_s for answer in (first, *uncached)]
    return Waits(cold, [answer.time_to_first_token_s for answer in later])


def check_ratio(waits: Waits) -> Verdict:
    """Hold the wait for the first token to have become at least `MIN_RATIO` times shorter."""
    cold = f"{waits.cold_s:.2f} s cold (median of {len(waits.all_cold_s)})"
    warm = f"{waits.warm_s:.3f} s warm (median of {len(waits.all_warm_s)})"
    if waits.ratio < MIN_RATIO:
        got = f"expected at least {MIN_RATIO:.0f} times shorter when warm, got {waits.ratio:.1f} times"
        return Verdict(False, f"time to first token: {got}: {cold}, {warm}")
    return Verdict(True, f"time to first token is {waits.ratio:.1f} times shorter when warm: {cold}, {warm}")


def _logits_at(step: int, *answers: Answer) -> str:
    """Show what each run had to choose from: its best two tokens and their logits."""
    shown = []
    for answer in answers:
        best = answer.top_logits[step] if step < len(answer.top_logits) else []
        choices = " or ".join(f"{token} ({logit:.4f})" for token, logit in best)
        shown.append(f"token {choices}" if choices else "the answer had ended")
    return ", and ".join(dict.fromkeys(shown))
