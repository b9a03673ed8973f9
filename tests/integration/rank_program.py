"""What each process of a tensor-parallel test runs, as torchrun would: `rank_program.py SCENARIO …`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from pagedkv.errors import PagedKVError
from pagedkv.runner.engine import Engine
from pagedkv.runner.loader import load_model
from pagedkv.runner.parallel import follow
from pagedkv.runner.ranks import Ranks
from pagedkv.runner.sampling import SamplingParams


def answers(model: Any, prompts: list[list[int]], num_tokens: int) -> list[dict[str, Any]]:
    """Each prompt by itself, two that begin differently in a tight pool, and two drawn samples."""
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    engine = Engine(model, num_blocks=40)
    requests = [request for prompt in prompts for request in engine.generate([prompt], params)]
    # Tight enough to preempt, with chunks of prompts between decodes.
    tight = Engine(model, num_blocks=9, max_batch_tokens=24)
    requests += tight.generate([prompts[0], prompts[0][::-1]], params)
    drawn = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=1.0, seed=3, n=2)
    requests += Engine(model, num_blocks=40).generate(prompts[:1], drawn)
    return [
        {
            "prompt": request.prompt_ids,
            "cached": request.num_cached_tokens,
            "preemptions": request.num_preemptions,
            "answers": [completion.output_ids for completion in request.completions],
        }
        for request in requests
    ]


def answer_all(ranks: Ranks, folders: list[str], prompts: str, out: str) -> None:
    """For each model, all answers of rank 0 into a file."""
    asked = json.loads(prompts)
    given = {}
    for folder in folders:
        model = load_model(folder, ranks=ranks).model
        if ranks.rank:
            follow(model, ranks)
        else:
            given[Path(folder).name] = answers(model, asked, 12)
            ranks.send(None)
    if not ranks.rank:
        Path(out).write_text(json.dumps(given))


def fail(ranks: Ranks, folder: str, who: str, how: str) -> None:
    """Answer, until one rank fails in the middle of a step."""
    model = load_model(folder, ranks=ranks).model
    inner: Any = model if ranks.rank else model._model  # type: ignore[attr-defined]
    forward, calls = inner.forward, 0

    def failing(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if ranks.rank == int(who) and calls == 3:
            if how == "vanish":
                os._exit(9)
            raise MemoryError("not enough for step 3")
        return forward(*arguments)

    inner.forward = failing
    if ranks.rank:
        follow(model, ranks)
    else:
        Engine(model, num_blocks=9).generate([[1, 2, 3]], SamplingParams(max_tokens=9, ignore_eos=True))


def refuse(ranks: Ranks, folder: str) -> None:
    """Ask for what can't run, which only rank 0 notices."""
    model = load_model(folder, ranks=ranks).model
    if ranks.rank:
        follow(model, ranks)
    else:
        Engine(model, num_blocks=2).generate([[1] * 100])


def main(scenario: str, *arguments: str) -> int:
    torch.set_num_threads(1)
    ranks = Ranks.from_environment()
    assert ranks is not None
    try:
        with ranks:
            if scenario == "answer_all":
                *folders, prompts, out = arguments
                answer_all(ranks, folders, prompts, out)
            else:
                {"fail": fail, "refuse": refuse}[scenario](ranks, *arguments)
    except (PagedKVError, MemoryError) as error:
        sys.stdout.write(f"{type(error).__name__}: {error}\n")
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
