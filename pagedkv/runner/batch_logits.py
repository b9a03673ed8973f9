"""From a step's hidden states to what each job chooses by them."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pagedkv.runner.job import Job
from pagedkv.runner.logprobs import TokenLogprobs
from pagedkv.runner.model import AnyModel
from pagedkv.runner.sampler import best_of_rows
from pagedkv.runner.scheduler import Part

NUM_PROMPT_ROWS = 128
"""Rows whose logits are held at once for the log-probabilities of a prompt: a vocabulary is wide."""


class Made(NamedTuple):
    """What a step brought to a job.

    Attributes
    ----------
    job : Job
    choice : object or None
        What `Job.choose` returned; None where nothing is to be chosen yet.
    of_prompt : list of TokenLogprobs
        Of the prompt's tokens that this step has told.
    """

    job: Job
    choice: Any
    of_prompt: list[TokenLogprobs]


@dataclass
class Choices:
    """What the jobs of a step chose.

    Attributes
    ----------
    made : list of Made
    failed : list of (Job, FloatingPointError)
        Those whose logits no token can be chosen by.
    num_accepted : list of int
        How many tokens of each of the step's sequences hold.
    """

    made: list[Made] = field(default_factory=list)
    failed: list[tuple[Job, FloatingPointError]] = field(default_factory=list)
    num_accepted: list[int] = field(default_factory=list)


def choose_all(model: AnyModel, hidden: Tensor, parts: list[Part]) -> Choices:
    """Compute the logits that are needed and let each job choose; changes none of them.

    Parameters
    ----------
    model : AnyModel
    hidden : Tensor [num_tokens, hidden]
        Of the step's tokens, part after part.
    parts : list of Part
    """
    starts = [0, *accumulate(sum(part.num_tokens) for part in parts)]
    rows_of = [part.job.rows(part.num_tokens) for part in parts]
    rows = [start + row for start, rows in zip(starts[:-1], rows_of, strict=True) for row in rows]
    logits = model.logits(hidden[rows])  # [len(rows), vocab]
    best = best_of_rows(logits)
    ends = [*accumulate(len(rows) for rows in rows_of)]
    choices = Choices()
    for part, start, rows, end in zip(parts, starts[:-1], rows_of, ends, strict=True):
        own = slice(end - len(rows), end)
        choice = None
        try:
            choice = part.job.choose(logits[own], best[own]) if rows else None
        except FloatingPointError as error:
            choices.failed.append((part.job, error))
        else:
            prompt = part.job.prompt_rows(part.num_tokens)
            judged = _judge_prompt(model, hidden[start : start + len(prompt)], part.job) if prompt else []
            if rows or prompt:
                choices.made.append(Made(part.job, choice, judged))
        choices.num_accepted += part.job.num_accepted(part.num_tokens, choice)
    return choices


def _judge_prompt(model: AnyModel, hidden: Tensor, job: Job) -> list[TokenLogprobs]:
    start = job.sequences[0].num_computed_tokens
    judged: list[TokenLogprobs] = []
    for piece in torch.split(hidden, NUM_PROMPT_ROWS):
        judged += job.judge_prompt(model.logits(piece), start + len(judged))
    return judged
