"""Layers with a window hold pages for that alone, and answers stay those of transformers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tiny_models import random_tokens

pytest.importorskip("transformers")

from tiny_transformers import VOCAB_SIZE, assert_greedy, save_reference

from pagedkv.errors import UsageError
from pagedkv.runner.engine import Engine
from pagedkv.runner.loader import load_model
from pagedkv.runner.sampling import SamplingParams

PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)
CHUNK = 16


@pytest.fixture(scope="module", params=["mistral", "qwen2_windows", "gemma2", "gemma3"])
def model_and_reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp(request.param)
    reference = save_reference(request.param, folder)
    return load_model(folder).model, reference


def prompt(num_tokens: int, seed: int) -> list[int]:
    return random_tokens(num_tokens, seed, vocab_size=VOCAB_SIZE)


def smallest_pool(model: Any, num_tokens: int) -> tuple[int, ...]:
    """Pages of each group that one sequence needs, computed in chunks."""
    spec = model.config.kv_spec("float32")
    return tuple(group.blocks_of(num_tokens, spec.block_size, CHUNK) for group in spec.groups)


def test_layers_of_one_window_are_a_group(model_and_reference: Any) -> None:
    config = model_and_reference[0].config
    groups = config.kv_spec("float32").groups
    assert sorted(layer for group in groups for layer in group.layers) == list(range(config.num_layers))
    for group in groups:
        assert {config.window(layer) for layer in group.layers} == {group.window}


def test_long_prompt_runs_in_the_pages_of_its_window(model_and_reference: Any) -> None:
    model, reference = model_and_reference
    num_tokens = 180 + PARAMS.max_tokens - 1
    pool = smallest_pool(model, num_tokens)
    assert pool[-1] < num_tokens // 16  # fewer than all tokens fill
    engine = Engine(model, num_blocks=pool, max_batch_tokens=CHUNK)
    for seed in (1, 2, 1):  # each evicts what the one before left
        (request,) = engine.generate([prompt(180, seed)], PARAMS)
        assert_greedy(reference, request.prompt_ids, request.output_ids)
        engine.cache.check_integrity()
    smaller = (*pool[:-1], pool[-1] - 1)
    with pytest.raises(UsageError, match=rf"at most {smaller[-1]} pages of 16 tokens .*window of"):
        Engine(model, num_blocks=smaller, max_batch_tokens=CHUNK).submit(prompt(180, 1), PARAMS)


def test_requests_that_share_and_preempt_answer_as_the_reference(model_and_reference: Any) -> None:
    model, reference = model_and_reference
    pool = tuple(2 * n for n in smallest_pool(model, 130))
    engine = Engine(model, num_blocks=pool, max_batch_tokens=40)
    stem = prompt(70, 3)
    prompts = [[*stem[: 20 * i], *prompt(30 + i, 4 + i)] for i in range(4)] + [stem, [*stem, 1, 2]]
    requests = [engine.submit(each, PARAMS) for each in prompts]
    while engine.has_work:
        engine.step()
        engine.cache.check_integrity()
    for request in requests:
        assert_greedy(reference, request.prompt_ids, request.output_ids)
    assert any(request.num_cached_tokens for request in requests)


@pytest.mark.parametrize("seed", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_any_order_of_requests_steps_and_aborts_answers_as_the_reference(
    model_and_reference: Any, seed: int
) -> None:
    model, reference = model_and_reference
    rng = random.Random(seed)
    stems = [prompt(100, 20 + i) for i in range(3)]
    pool = tuple(rng.randint(n, 3 * n) for n in smallest_pool(model, 140))
    engine = Engine(model, num_blocks=pool, max_batch_tokens=CHUNK, max_num_seqs=4)
    requests = []
    for _ in range(60):
        action = rng.random()
        if action < 0.3:
            stem = rng.choice(stems)[: rng.randint(0, 100)]
            asked = [*stem, *prompt(rng.randint(1, 20), rng.randint(0, 99))]
            params = SamplingParams(
                max_tokens=rng.randint(1, 20), ignore_eos=True, num_speculative_tokens=rng.choice([0, 3])
            )
            requests.append(engine.submit(asked, params))
        elif action < 0.4 and requests:
            engine.abort(rng.choice(requests))
        else:
            engine.step()
        engine.cache.check_integrity()
    engine.run()
    finished = [request for request in requests if request.finish_reason == "length"]
    assert len(finished) > 5
    for request in finished:
        assert_greedy(reference, request.prompt_ids, request.output_ids)
    assert all(
        group.num_writable_blocks == group.num_committed_blocks == 0 for group in engine.cache.stats().groups
    )


def test_guesses_beams_and_samples_work_over_windows(model_and_reference: Any) -> None:
    model, reference = model_and_reference
    pattern = prompt(9, 5) * 8
    engine = Engine(model, num_blocks=60, max_batch_tokens=CHUNK)
    guessed, plain = (
        SamplingParams(max_tokens=20, ignore_eos=True, num_speculative_tokens=n) for n in (4, 0)
    )
    (with_guesses,) = engine.generate([pattern], guessed)
    assert_greedy(reference, pattern, with_guesses.output_ids)
    (without,) = engine.generate([pattern], plain)
    assert_greedy(reference, pattern, without.output_ids)
    beams = SamplingParams(max_tokens=12, ignore_eos=True, num_beams=3, n=3)
    roomy, tight = (
        Engine(model, num_blocks=n, max_batch_tokens=CHUNK).generate([pattern], beams)[0] for n in (80, 24)
    )
    assert [each.output_ids for each in roomy.completions] == [each.output_ids for each in tight.completions]
    samples = SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.0, seed=1, n=3)
    together = engine.generate([pattern], samples)[0]
    again = Engine(model, num_blocks=60, prefix_caching=False).generate([pattern], samples)[0]
    assert [each.output_ids for each in together.completions] == [
        each.output_ids for each in again.completions
    ]


def test_memory_is_divided_among_groups(model_and_reference: Any) -> None:
    model = model_and_reference[0]
    engine = Engine(model, memory="3MiB")
    spec, counts = engine.cache.spec, engine.cache.pool.num_blocks_by_group
    sizes = [group.bytes_per_token * spec.block_size for group in spec.groups]
    used = sum(n * size for n, size in zip(counts, sizes, strict=True))
    assert 0 <= 3 * 2**20 - used <= sum(sizes)
