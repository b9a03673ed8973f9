"""The demo's requests: what is asked of the model, and how it is timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.resources import files
from statistics import median
from typing import NamedTuple

from pagedkv.checks import show
from pagedkv.cli.demo_checks import Answer
from pagedkv.cli.plot import Point
from pagedkv.errors import UsageError
from pagedkv.runner.engine import Engine
from pagedkv.runner.request import Request
from pagedkv.runner.sampling import SamplingParams
from pagedkv.runner.tokenizer import Tokenizer

INSTRUCTION = "Answer in one short sentence, from this handbook.\n\n"
# A model of 135 million parameters finds numbers and names; it explains nothing.
QUESTIONS = (
    ("Ada", "What are the four states of a page?"),
    ("Ben", "How many rules does the scheduler follow?"),
    ("Cleo", "What does pagedkv info show?"),
    ("Dan", "How many people ask about the document in the example?"),
)
SWEEP_LENGTHS = (512, 1024, 2048, 4096)
NUM_QUESTION_TOKENS = 16
"""What is new in each warm prompt of the sweep."""
NUM_WARM_RUNS = 3
WARM_UP_TOKENS = 512

Advance = Callable[[int], None]
"""Called with the number of tokens that were computed or found since the last call."""


class Prompt(NamedTuple):
    """What a user asks, and the tokens of the whole conversation."""

    user: str
    question: str
    token_ids: list[int]


def read_handbook() -> str:
    """Return the text of the handbook that the package ships."""
    return files("pagedkv.cli").joinpath("handbook.md").read_text(encoding="utf-8")


def make_prompts(tokenizer: Tokenizer, context: str) -> list[Prompt]:
    """Lay out one conversation a user: the context as the system message, then the question.

    A model without a chat template reads the same as plain text.
    """
    prompts = []
    for user, question in QUESTIONS:
        if tokenizer.chat_template is None:
            token_ids = tokenizer.encode(f"{INSTRUCTION}{context}\n\nQuestion: {question}\nAnswer:")
        else:
            messages = [
                {"role": "system", "content": INSTRUCTION + context},
                {"role": "user", "content": question},
            ]
            token_ids = tokenizer.encode_chat(messages)
        prompts.append(Prompt(user, question, token_ids))
    return prompts


def count_shared_tokens(prompts: Sequence[Prompt]) -> int:
    """Return how many tokens all prompts begin with."""
    columns = zip(*(prompt.token_ids for prompt in prompts), strict=False)
    return next((i for i, column in enumerate(columns) if len(set(column)) > 1), 0)


def count_tokens(prompts: Sequence[Prompt], max_tokens: int) -> int:
    """Return how many tokens the prompts and their longest answers have, for a progress bar."""
    return sum(len(prompt.token_ids) + max_tokens for prompt in prompts)


def warm_up(engine: Engine, prompt: Prompt) -> None:
    """Run a short prompt cold and warm, so that costs of the first call fall on no measurement."""
    for _ in range(2):
        engine.generate([prompt.token_ids[:WARM_UP_TOKENS]], SamplingParams(max_tokens=2, ignore_eos=True))
    forget_everything(engine)


def ask_all(
    engine: Engine,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int,
    salts: Sequence[str | None] | None = None,
    advance: Advance,
) -> list[Answer]:
    """Ask one user's question after the other's: nobody waits for anybody, so times can be compared.

    Parameters
    ----------
    salts : sequence of (str or None), optional
        The cache salt of each prompt.
    """
    params = SamplingParams(max_tokens=max_tokens, num_top_logits=2)
    answers = []
    for prompt, salt in zip(prompts, salts or [None] * len(prompts), strict=True):
        request = run_request(engine, prompt.token_ids, params=params, salt=salt, advance=advance)
        answers.append(
            Answer(
                user=prompt.user,
                question=prompt.question,
                num_prompt_tokens=request.num_prompt_tokens,
                num_cached_tokens=request.num_cached_tokens,
                time_to_first_token_s=time_to_first_token_s(request),
                decode_tokens_per_s=request.decode_tokens_per_s,
                token_ids=request.output_ids,
                top_logits=request.top_logits,
                text=request.text,
            )
        )
    return answers


def run_request(
    engine: Engine,
    token_ids: Sequence[int],
    *,
    params: SamplingParams,
    salt: str | None = None,
    advance: Advance,
) -> Request:
    """Run one request to its end, reporting progress after every step."""
    request = engine.submit(token_ids, params, cache_salt=salt)
    total = len(token_ids) + params.max_tokens
    num_done = 0
    while not request.is_finished:
        engine.step()
        now = total if request.is_finished else request.num_computed_tokens  # an answer may end early
        advance(now - num_done)
        num_done = now
    return request


def sweep(
    engine: Engine, prompts: Sequence[Prompt], *, lengths: Sequence[int], advance: Advance
) -> list[Point]:
    """Time the first token of prompts of several lengths, cold and then warm.

    All prompts of a length begin alike and end with `NUM_QUESTION_TOKENS` tokens of a question, another one
    each. Empties the cache before each length and at the end.

    Returns
    -------
    list of Point
        Warm times are medians of up to `NUM_WARM_RUNS`.
    """
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    endings = [prompt.token_ids[-NUM_QUESTION_TOKENS:] for prompt in prompts[: NUM_WARM_RUNS + 1]]
    points = []
    for length in lengths:
        beginning = prompts[0].token_ids[: length - NUM_QUESTION_TOKENS]
        cold, *warm = (
            time_to_first_token_s(run_request(engine, beginning + ending, params=params, advance=advance))
            for ending in endings
        )
        forget_everything(engine)
        points.append(Point(length, cold, median(warm)))
    return points


def sweep_tokens(lengths: Sequence[int]) -> int:
    """Return how many tokens `sweep` reports, for a progress bar."""
    return sum(lengths) * (NUM_WARM_RUNS + 1) + len(lengths) * (NUM_WARM_RUNS + 1)


def forget_everything(engine: Engine) -> None:
    """Empty the cache between two measurements."""
    is_empty = engine.cache.reset()
    assert is_empty, "no request is running"


def time_to_first_token_s(request: Request) -> float:
    """Return the seconds from submission to the first token of a finished request."""
    assert request.time_to_first_token_s is not None, "it is finished"
    return request.time_to_first_token_s


def check_context(num_prompt_tokens: int, max_tokens: int, context_length: int) -> None:
    """Refuse a model that is too short for the handbook before anything is measured.

    Raises
    ------
    UsageError
    """
    needed = num_prompt_tokens + max_tokens
    if needed > context_length:
        expected = f"a model with a context of at least {needed:,} tokens (handbook, question and answer)"
        raise UsageError(f"model: expected {expected}, got {show(context_length)}")
