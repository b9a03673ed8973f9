"""`pagedkv run`: answers one prompt, or several at once."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console

from pagedkv.cli import run_options as options
from pagedkv.cli.model_loading import (
    joined_ranks,
    load_named_model,
    make_engine,
    progress_bar,
    require_tokenizer,
    serve_metrics,
    use_threads,
)
from pagedkv.cli.outputs import check_output
from pagedkv.cli.prompt_files import read_prompts
from pagedkv.cli.run_report import answer_title, cost_table, logprob_table, stats_table
from pagedkv.errors import PagedKVError, UsageError

if TYPE_CHECKING:
    from pagedkv.runner import Engine, Request, Tokenizer


def run(
    model: options.Model,
    revision: options.Revision = None,
    prompt: options.Prompt = None,
    prompts: options.PromptFile = None,
    chat: options.Chat = False,
    system: options.System = None,
    max_tokens: options.MaxTokens = 256,
    stop: options.Stop = None,
    ignore_eos: options.IgnoreEos = False,
    deadline_s: options.DeadlineS = None,
    num_samples: options.NumSamples = 1,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    seed: options.Seed = None,
    beams: options.Beams = 1,
    length_penalty: options.LengthPenalty = 1.0,
    early_stopping: options.EarlyStopping = False,
    speculate: options.Speculate = 0,
    logprobs: options.Logprobs = None,
    prompt_logprobs: options.PromptLogprobs = None,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    presence_penalty: options.PresencePenalty = 0.0,
    frequency_penalty: options.FrequencyPenalty = 0.0,
    logit_bias: options.LogitBias = None,
    schedule: options.Schedule = "fcfs",
    dtype: options.DType = "float32",
    device: options.Device = "cpu",
    threads: options.Threads = None,
    memory: options.Memory = None,
    num_blocks: options.NumBlocks = None,
    salt: options.Salt = None,
    no_prefix_caching: options.NoPrefixCaching = False,
    snapshot: options.Snapshot = None,
    stats: options.Stats = False,
    metrics_port: options.MetricsPort = None,
    metrics_prefix: options.MetricsPrefix = "pagedkv",
) -> None:
    """Answer prompts with a model, through the cache.

    The answer to a single prompt is printed as it is written. Answers go to stdout, all else to stderr.

    For example: pagedkv run smollm2 --chat --prompt "What is a page?"

    Several processes compute one model together: torchrun --nproc-per-node 2 -m pagedkv run …
    """
    use_threads(threads)
    from pagedkv.runner import SamplingParams
    from pagedkv.runner.parallel import follow

    params = SamplingParams(
        n=num_samples,
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=tuple(_as_bias(text) for text in logit_bias or ()),
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        num_speculative_tokens=speculate,
        num_beams=beams,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
    )
    if system is not None and not chat:
        raise UsageError("--system: expected --chat with it, got none")
    pages = options.pages_of(memory, num_blocks)
    check_output("--snapshot", snapshot)
    texts = [*(prompt or ()), *(() if prompts is None else read_prompts(prompts))]
    if not texts:
        raise UsageError("--prompt: expected at least one, or a file of them with --prompts, got none")

    with joined_ranks(device) as ranks:
        console = Console(stderr=True, quiet=ranks is not None and ranks.rank > 0)
        with progress_bar(console) as progress:
            loaded = load_named_model(
                model, dtype, device=device, revision=revision, ranks=ranks, progress=progress
            )
        if ranks is not None and ranks.rank > 0:
            follow(loaded.model, ranks)
            return
        tokenizer = require_tokenizer(loaded, model)
        engine = make_engine(loaded, **pages, prefix_caching=not no_prefix_caching, schedule=schedule)
        encoded = [_encode(tokenizer, each, chat=chat, system=system) for each in texts]
        asked = {"params": params, "cache_salt": salt, "deadline_s": deadline_s}
        with serve_metrics(engine, metrics_port, metrics_prefix, console):
            if len(encoded) == 1 and num_samples == 1:
                requests = [_stream(engine, encoded[0], **asked)]
            else:
                requests = _run_batch(engine, encoded, console=console, **asked)
                _print_answers(texts, requests)
        for number, request in enumerate(requests, 1):
            if prompt_logprobs is not None:
                console.print(logprob_table(request.prompt_logprobs, tokenizer, f"[{number}] prompt"))
            if logprobs is not None:
                for each in request.completions:
                    console.print(logprob_table(each.logprobs, tokenizer, answer_title(number, each)))
        console.print(cost_table(requests))
        if stats:
            console.print(stats_table(engine, requests))
        for number, request in enumerate(requests, 1):
            if request.error is not None:
                raise PagedKVError(f"prompt {number}: expected an answer, got none: {request.error}")
        if snapshot is not None:
            engine.cache.pool.snapshot().save(snapshot)


def _as_bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        expected = "a token id and a number, such as 42=-1.5"
        raise UsageError(f"--logit-bias: expected {expected}, got {text!r}") from None


def _encode(tokenizer: Tokenizer, text: str, *, chat: bool, system: str | None) -> list[int]:
    if not chat:
        return tokenizer.encode(text)
    messages = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return tokenizer.encode_chat(messages)


def _stream(engine: Engine, prompt: list[int], **asked: Any) -> Request:
    """Run one request and write its text as it comes."""
    with engine.stream(prompt, **asked) as texts:
        try:
            for text in texts:
                sys.stdout.write(text)
                sys.stdout.flush()
        except FloatingPointError:
            pass  # the request knows it
    sys.stdout.write("\n")
    return texts.request


def _run_batch(engine: Engine, prompts: list[list[int]], *, console: Console, **asked: Any) -> list[Request]:
    """Run all requests at once, with a bar that counts the tokens of their answers."""
    with progress_bar(console) as progress:
        task = progress.add_task("answering", total=None, unit="tokens")
        requests = engine.generate(prompts, on_token=lambda *_: progress.advance(task), **asked)
        progress.update(task, total=sum(request.num_output_tokens for request in requests))
    return requests


def _print_answers(prompts: list[str], requests: list[Request]) -> None:
    for number, (prompt, request) in enumerate(zip(prompts, requests, strict=True), 1):
        if len(request.completions) > 1:
            print(f"[{number}] {prompt}")
            for each in request.completions:
                print(f"{answer_title(number, each)}\n{each.text}")
            print()
        else:
            print(f"[{number}] {prompt}\n{request.text}\n")
