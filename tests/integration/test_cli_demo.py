"""`pagedkv demo`: its parts on a tiny model, and the whole command."""

from __future__ import annotations

import struct
from io import StringIO
from pathlib import Path

import pytest
from command import one_sentence, run
from rich.console import Console
from tiny_folders import write_tiny_folder

from pagedkv.cli import demo_runs
from pagedkv.cli.demo import judge, measure
from pagedkv.cli.demo_checks import Answer, check_same_answers
from pagedkv.cli.demo_report import print_report
from pagedkv.cli.demo_runs import Prompt
from pagedkv.cli.model_loading import progress_bar
from pagedkv.cli.plot import Point, save_plot
from pagedkv.hashing import hash_blocks
from pagedkv.runner.engine import Engine
from pagedkv.runner.loader import LoadedModel, load_model
from pagedkv.runner.tokenizer import Tokenizer

CONTEXT = " ".join(f"Fact {i}: page {i * 7} holds block {i * 3}." for i in range(40))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(write_tiny_folder(tmp_path_factory.mktemp("tiny"), context_length=2048, text=CONTEXT))


@pytest.fixture(scope="module")
def prompts(tiny: LoadedModel) -> list[Prompt]:
    assert tiny.tokenizer is not None
    return demo_runs.make_prompts(tiny.tokenizer, CONTEXT)


def ignore(_: int) -> None:
    pass


def size_of_png(path: Path) -> tuple[int, int]:
    contents = path.read_bytes()
    assert contents[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", contents[16:24])
    return width, height


def test_handbook_is_long_enough_and_fits_the_model(smollm2: LoadedModel) -> None:
    assert smollm2.tokenizer is not None
    prompts = demo_runs.make_prompts(smollm2.tokenizer, demo_runs.read_handbook())
    assert demo_runs.count_shared_tokens(prompts) >= 4600
    assert max(len(prompt.token_ids) for prompt in prompts) < 6000


def test_handbook_does_not_repeat_itself(smollm2: LoadedModel) -> None:
    assert smollm2.tokenizer is not None
    lines = [line for line in demo_runs.read_handbook().splitlines() if len(line) > 30]
    assert len(set(lines)) == len(lines)
    tokens = smollm2.tokenizer.encode(demo_runs.read_handbook())
    runs = [tuple(tokens[i : i + 16]) for i in range(len(tokens) - 15)]
    assert len(set(runs)) == len(runs)


def test_handbook_s_samples_run() -> None:
    samples = demo_runs.read_handbook().split("```python\n")[1:]
    assert len(samples) >= 2
    for sample in samples:
        exec(sample.split("```")[0], {})


def test_handbook_s_generate_answers_as_the_engine(tiny: LoadedModel, prompts: list[Prompt]) -> None:
    names: dict[str, object] = {}
    (sample,) = [s for s in demo_runs.read_handbook().split("```python\n") if s.startswith("def generate")]
    exec(sample.split("```")[0], names)
    generate = names["generate"]
    assert callable(generate)
    prompt = prompts[0].token_ids[:100]
    expected = demo_runs.ask_all(
        Engine(*tiny, num_blocks=20), [Prompt("", "", prompt)], max_tokens=8, advance=ignore
    )
    answer = generate(Engine(*tiny, num_blocks=20).cache, tiny.model, prompt, 8)
    assert answer.tolist()[: len(expected[0].token_ids)] == expected[0].token_ids


def test_every_user_s_prompt_begins_with_the_whole_context(tiny: LoadedModel, prompts: list[Prompt]) -> None:
    assert tiny.tokenizer is not None
    num_shared = demo_runs.count_shared_tokens(prompts)
    assert CONTEXT in tiny.tokenizer.decode(prompts[0].token_ids[:num_shared])
    assert len({tuple(prompt.token_ids) for prompt in prompts}) == len(prompts) >= 4
    for prompt in prompts:
        assert prompt.question in tiny.tokenizer.decode(prompt.token_ids[num_shared - 40 :])


def test_model_without_a_chat_template_reads_plain_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write_tiny_folder(tmp_path / "plain", chat=False, text=CONTEXT))
    assert tokenizer is not None
    text = tokenizer.decode(demo_runs.make_prompts(tokenizer, CONTEXT)[0].token_ids)
    assert CONTEXT in text
    assert text.endswith("Answer:")


def test_measured_answers_keep_all_promises_but_the_length(tiny: LoadedModel, prompts: list[Prompt]) -> None:
    with progress_bar(Console(file=StringIO(), force_terminal=True)) as progress:
        measured = measure(tiny, prompts, max_tokens=6, progress=progress)
        assert all(task.completed == task.total for task in progress.tasks)
    num_shared = demo_runs.count_shared_tokens(prompts)
    with_reuse, salted, isolation, _, _ = judge(measured, num_shared_tokens=num_shared, dtype="float32")
    assert with_reuse.holds
    assert salted.holds
    assert isolation.holds
    assert [answer.num_cached_tokens for answer in measured.uncached] == [0] * len(prompts)
    cold, *warm = measured.shared
    assert cold.num_cached_tokens == 0
    assert all(num_shared <= answer.num_cached_tokens < answer.num_prompt_tokens for answer in warm)
    for answer in (*measured.shared, *measured.uncached, *measured.salted):
        assert [best[0][0] for best in answer.top_logits] == answer.token_ids  # greedy
        assert all(best[0][1] >= best[1][1] for best in answer.top_logits)
    lengths = [n for n in demo_runs.SWEEP_LENGTHS if n < len(prompts[0].token_ids)]
    assert [point.num_prompt_tokens for point in measured.points] == [*lengths, cold.num_prompt_tokens]


def test_wrong_page_is_noticed(tiny: LoadedModel, prompts: list[Prompt]) -> None:
    """The check can fail: one overwritten page of the shared beginning, and answers differ."""
    engine = Engine(*tiny, num_blocks=300)
    right = demo_runs.ask_all(engine, prompts, max_tokens=6, advance=ignore)
    page = engine.cache.match(prompts[0].token_ids).block_ids[3]
    assert (
        engine.cache.pool.digest_of(page)
        == hash_blocks(prompts[0].token_ids[:64], namespace=tiny.model.namespace)[-1]
    )
    engine.cache.pages.blocks[page] = 3.0
    wrong = demo_runs.ask_all(engine, prompts, max_tokens=6, advance=ignore)
    verdict = check_same_answers("right and wrong", right, wrong, dtype="float32")
    assert not verdict.holds
    assert verdict.notes


def test_sweep_times_each_length_cold_and_warm(tiny: LoadedModel, prompts: list[Prompt]) -> None:
    engine = Engine(*tiny, num_blocks=100)
    reported: list[int] = []
    points = demo_runs.sweep(engine, prompts, lengths=(64, 256), advance=reported.append)
    assert [point.num_prompt_tokens for point in points] == [64, 256]
    assert all(point.cold_s > 0 and point.warm_s > 0 for point in points)
    assert sum(reported) == demo_runs.sweep_tokens((64, 256))
    assert engine.cache.stats().num_free_blocks == 100  # nothing is left for the next measurement


def fake_answers() -> list[Answer]:
    logits = [[(1, 2.0), (2, 1.0)]]
    return [
        Answer("Ada", "What is a page?", 5000, 0, 12.5, None, [1], logits, "A [red]page[/red] is memory."),
        Answer("Ben", "And a block?", 5001, 4990, 0.25, 4.56, [1], logits, "word " * 40),
    ]


@pytest.mark.parametrize("width", [80, 110, 200])
def test_report_shows_figures_ratio_and_verdicts(width: int) -> None:
    answers = fake_answers()
    different = [answer._replace(token_ids=[2]) for answer in answers]
    verdicts = [
        check_same_answers("of both kinds", answers, different, dtype="float32"),
        check_same_answers("of one kind", answers, answers, dtype="float32"),
    ]
    console = Console(file=StringIO(), width=width)
    print_report(console, {"first": answers, "second": different}, verdicts, ratio=50.0)
    assert isinstance(console.file, StringIO)
    text = console.file.getvalue()
    for word in ("5,001", "4,990", "11", "0.250 s", "4.6", "12.500 s", "cold : warm = 50.0 : 1", "second"):
        assert word in text
    assert max(map(len, text.splitlines())) <= width
    # What is broken comes last, where it is seen.
    assert text.index("of one kind") < text.index("BROKEN") < text.index("of both kinds")
    assert "Ada: step 0 differs" in " ".join(text.split())


def test_answers_are_shown_as_they_are() -> None:
    console = Console(file=StringIO(), width=150)
    print_report(console, {"first": fake_answers()}, [], ratio=1.0)
    assert isinstance(console.file, StringIO)
    assert "[red]page[/red]" in console.file.getvalue()


def test_picture_is_a_png_that_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "picture"  # a PNG whatever its name
    save_plot([Point(4096, 8.0, 0.2), Point(512, 0.7, 0.1)], path, subtitle="tiny, float32")
    width, height = size_of_png(path)
    assert 1000 <= width <= 2000
    assert 600 <= height <= 1200
    assert 10_000 < path.stat().st_size < 500_000


@pytest.mark.slow
def test_demo_runs_on_another_model(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "m", context_length=16_384, text=demo_runs.read_handbook())
    picture = tmp_path / "picture.png"
    result = run(
        "demo", "--model", str(folder), "--max-tokens", "4", "--threads", "1", "--output", str(picture)
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "1 CPU thread" in result.stdout
    assert result.stdout.count("✓") == 5
    assert "running: cache off" in result.stderr
    size_of_png(picture)


def test_demo_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    short = write_tiny_folder(tmp_path / "short", context_length=512)
    message = one_sentence(run("demo", "--model", str(short)))
    assert "model: expected a model with a context of at least" in message
    message = one_sentence(run("demo", "--model", str(short), "--output", str(tmp_path / "no" / "p.png")))
    assert "--output: expected a file in a folder that exists" in message
    assert "--threads: expected" in one_sentence(run("demo", "--threads", "0"))
    assert "--max-tokens: expected" in one_sentence(run("demo", "--max-tokens", "0"))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_demo_on_the_real_model_keeps_every_promise(smollm2_path: Path, tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    result = run("demo", "--output", str(picture), timeout_s=1200)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("✓") == 5
    assert "BROKEN" not in result.stdout
    size_of_png(picture)
