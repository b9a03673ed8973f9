"""`pagedkv run`: answers, and one sentence for whatever a user gets wrong."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from command import one_sentence, run
from tiny_folders import write_tiny_folder

from pagedkv import PoolSnapshot
from pagedkv.__main__ import main
from pagedkv.cli.prompt_files import read_prompts
from pagedkv.errors import UsageError
from pagedkv.runner.engine import Engine
from pagedkv.runner.loader import load_model
from pagedkv.runner.sampling import SamplingParams

TEXT = "A page is the memory that holds a block. " * 3
PROMPT = "A page is the memory that holds"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("tiny"), text=TEXT)


def expected_text(folder: Path, prompt: str, *, max_tokens: int = 12, system: str | None = None) -> str:
    loaded = load_model(folder)
    assert loaded.tokenizer is not None
    token_ids = loaded.tokenizer.encode(prompt)
    if system is not None:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": prompt}]
        token_ids = loaded.tokenizer.encode_chat(messages)
    (request,) = Engine(*loaded, num_blocks=64).generate([token_ids], SamplingParams(max_tokens=max_tokens))
    return request.text


def figures(stderr: str) -> list[list[str]]:
    """Return the rows of the table of costs: number, prompt tokens, cached, seconds, …"""
    return [row.split() for row in stderr.splitlines() if re.match(r"\[\d+\]", row)]


def test_single_prompt_prints_the_answer_alone_on_stdout(folder: Path) -> None:
    result = run("run", str(folder), "--prompt", PROMPT, "--max-tokens", "12")
    assert result.returncode == 0, result.stderr
    assert result.stdout == expected_text(folder, PROMPT) + "\n"
    (row,) = figures(result.stderr)
    assert row[2] == "0"


def test_chat_uses_the_model_s_template_and_system_message(folder: Path) -> None:
    arguments = ("--chat", "--system", "Be brief.", "--prompt", PROMPT, "--max-tokens", "12")
    result = run("run", str(folder), *arguments)
    assert result.returncode == 0, result.stderr
    assert result.stdout == expected_text(folder, PROMPT, system="Be brief.") + "\n"


def test_prompts_of_one_batch_share_their_beginning(folder: Path) -> None:
    prompts = [TEXT + "one", TEXT + "two", "else"]
    arguments = [part for prompt in prompts for part in ("--prompt", prompt)]
    result = run("run", str(folder), *arguments, "--max-tokens", "12")
    assert result.returncode == 0, result.stderr
    for i, prompt in enumerate(prompts):
        assert f"[{i + 1}] {prompt}\n{expected_text(folder, prompt)}\n" in result.stdout
    first, second, third = figures(result.stderr)
    assert first[2] == third[2] == "0"
    assert int(second[2]) > 16
    assert "cached" in result.stderr
    off = run("run", str(folder), *arguments, "--max-tokens", "12", "--no-prefix-caching")
    assert off.stdout == result.stdout
    assert [row[2] for row in figures(off.stderr)] == ["0", "0", "0"]


@pytest.mark.slow
def test_sampling_options_reach_the_sampler(folder: Path) -> None:
    def text(*arguments: str) -> str:
        result = run("run", str(folder), "--prompt", PROMPT, "--max-tokens", "12", *arguments)
        assert result.returncode == 0, result.stderr
        return result.stdout

    drawn = text("--temperature", "2", "--top-p", "0.95", "--seed", "1")
    assert drawn == text("--temperature", "2", "--top-p", "0.95", "--seed", "1")
    assert drawn != text("--temperature", "2", "--top-p", "0.95", "--seed", "2")
    greedy = text("--temperature", "2", "--top-k", "1")
    assert greedy == text()
    stop = greedy[2:4]
    assert text("--stop", stop) == greedy[: greedy.index(stop)] + "\n"
    assert text("--dtype", "bfloat16", "--salt", "tenant", "--num-blocks", "8").endswith("\n")


def test_snapshot_holds_what_the_run_left_in_the_pool(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "pool.npz"
    prompts = ("--prompt", TEXT + "one", "--prompt", TEXT + "two")
    result = run("run", str(folder), *prompts, "--num-blocks", "32", "--snapshot", str(path))
    assert result.returncode == 0, result.stderr
    snapshot = PoolSnapshot.load(path)
    assert (snapshot.num_blocks, snapshot.block_size) == (32, 16)
    num_prompt_tokens = int(figures(result.stderr)[0][1])
    evictable = snapshot.state == 3
    assert evictable.sum() >= num_prompt_tokens // 16
    assert not snapshot.num_refs.any()
    drawn = run("inspect", str(path))
    assert drawn.returncode == 0, drawn.stderr
    assert drawn.stdout.startswith("pool.npz: 32 pages of 16 tokens")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--temperature", "-1"), "temperature: expected 0 or more, got -1.0"),
        (("--temperature", "nan"), "temperature: expected 0 or more, got nan"),
        (("--top-p", "0"), "top_p: expected more than 0, at most 1, got 0.0"),
        (("--top-k", "-3"), "top_k: expected an integer from 0"),
        (("--max-tokens", "0"), "max_tokens: expected an integer from 1"),
        (("--seed", "-1"), "seed: expected an integer from 0"),
        (("--stop", ""), "stop: expected texts that are not empty"),
        (("--dtype", "int4"), "dtype: expected 'float32', 'bfloat16' or 'int8', got 'int4'"),
        (
            ("--memory", "1GiB", "--num-blocks", "9"),
            "--memory and --num-blocks: expected one of them, got both",
        ),
        (("--memory", "a lot"), "memory: expected bytes or a size like '2GiB'"),
        (("--memory", "1"), "memory: expected at least the"),
        (
            ("--num-blocks", "400000000"),
            "pages: expected ",
        ),
        (("--num-blocks", "0"), "num_blocks: expected an integer from 1"),
        (("--num-blocks", "2"), "request: expected at most 2 pages of 16 tokens (the pool), got"),
        (("--salt", ""), "cache_salt: expected 1 to 128 bytes, got 0"),
        (("--salt", "s" * 129), "cache_salt: expected 1 to 128 bytes, got 129"),
        (("--system", "Be brief."), "--system: expected --chat with it"),
        (("--snapshot", "no/such/folder/s.npz"), "--snapshot: expected a file in a folder that exists"),
        (("--prompt", "word " * 600), "prompt: expected fewer tokens than the model's context of 512, got"),
        (("--prompt", ""), "prompt: expected at least one token, got none"),
    ],
)
def test_wrong_option_is_one_sentence(
    folder: Path,
    arguments: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    # In this process: twenty more that import torch would take a minute.
    monkeypatch.setattr(sys, "argv", ["pagedkv", "run", str(folder), "--prompt", PROMPT, *arguments])
    assert main() == 2
    said = capfd.readouterr()
    assert said.out == ""
    assert said.err.startswith("pagedkv: ")
    assert said.err.count("\n") == 1
    assert message in said.err


def test_what_is_no_model_is_one_sentence(folder: Path, tmp_path: Path) -> None:
    def refusal(path: Path) -> str:
        message = one_sentence(run("run", str(path), "--prompt", PROMPT))
        assert str(path) in message
        return message

    assert "got No such file or directory" in refusal(tmp_path / "nothing.gguf")
    assert "got a folder without one" in refusal(tmp_path)
    text = tmp_path / "notes.txt"
    text.write_text("no model")
    assert "got a file of another kind" in refusal(text)
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF" + bytes(100))
    assert "model: expected" in refusal(damaged)

    other = write_tiny_folder(tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "architectures": ["MambaForCausalLM"]}))
    assert "got 'MambaForCausalLM'" in refusal(other)


def test_model_without_tokenizer_or_template_is_one_sentence(tmp_path: Path) -> None:
    plain = write_tiny_folder(tmp_path / "plain", chat=False)
    assert "chat template: expected" in one_sentence(run("run", str(plain), "--chat", "--prompt", PROMPT))
    (plain / "tokenizer.json").unlink()
    assert "tokenizer: expected tokenizer.json" in one_sentence(run("run", str(plain), "--prompt", PROMPT))


@pytest.mark.parametrize("package", ["torch", "tokenizers", "safetensors", "gguf", "jinja2"])
@pytest.mark.parametrize("command", ["run", "demo"])
def test_without_the_runner_extra_one_sentence_names_it(folder: Path, package: str, command: str) -> None:
    arguments = (
        ("run", str(folder), "--prompt", PROMPT) if command == "run" else ("demo", "--model", str(folder))
    )
    message = one_sentence(run(*arguments, hide=(package,)))
    assert package in message
    assert "pip install 'pagedkv[runner]'" in message


def test_help_names_every_way_to_give_a_model() -> None:
    for command in ("run", "demo"):
        result = run(command, "--help")
        assert result.returncode == 0
        for word in ("GGUF", "Hugging Face", "smollm2", "float32", "bfloat16"):
            assert word in result.stdout


def test_missing_arguments_are_refused_with_exit_code_2(folder: Path) -> None:
    for arguments in (
        ("run",),
        ("run", str(folder), "--prompt", "x", "--top-k", "many"),
    ):
        result = run(*arguments)
        assert result.returncode == 2
        assert result.stderr
        assert "Traceback" not in result.stderr


def test_interrupt_ends_quietly_with_130(tmp_path: Path) -> None:
    # With room for so long an answer that it can't end before the signal comes.
    folder = write_tiny_folder(tmp_path, context_length=20_000, text=TEXT)
    process = subprocess.Popen(
        [
            sys.executable,
            "-u",
            "-m",
            "pagedkv",
            "run",
            str(folder),
            "--prompt",
            PROMPT,
            "--max-tokens",
            "19000",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUTF8": "1"},
        # A shell may have started the tests with interrupts ignored, as it does in the background.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    process.stdout.read(1)  # the answer has begun
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 130
    assert stderr == b""


def test_smollm2_answers_by_its_name(smollm2_path: Path) -> None:
    result = run(
        "run", "smollm2", "--chat", "--prompt", "What is the capital of France?", "--max-tokens", "12"
    )
    assert result.returncode == 0, result.stderr
    assert "Paris" in result.stdout


def test_several_answers_beams_and_their_figures(folder: Path) -> None:
    common = ("run", str(folder), "--prompt", PROMPT, "--max-tokens", "6")
    result = run(*common, "--num-samples", "3", "--temperature", "1.5", "--seed", "4", "--logprobs", "2")
    assert result.returncode == 0, result.stderr
    assert [line for line in result.stdout.splitlines() if line.startswith("[1")] == [
        f"[1] {PROMPT}", "[1.1]", "[1.2]", "[1.3]",
    ]  # fmt: skip
    assert "logprob" in result.stderr
    (row,) = figures(result.stderr)
    assert int(row[4]) == 18
    result = run(
        *common, "--beams", "3", "--num-samples", "2", "--length-penalty", "0.5",
        "--early-stopping", "--ignore-eos", "--stop", "zz", "--logprobs", "0", "--prompt-logprobs", "1",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert {"[1] prompt", "[1.1]", "[1.2]"} <= {
        line.strip().split(" -")[0] for line in result.stderr.splitlines()
    }
    scores = [float(match) for match in re.findall(r"^\[1\.\d\] (-?[\d.]+)$", result.stdout, re.MULTILINE)]
    assert len(scores) == 2
    assert scores[0] >= scores[1]


def test_guesses_and_schedules_change_no_answer(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text(f"{PROMPT}\n\n{TEXT}one\n{TEXT}two\n", encoding="utf-8")
    lines = [json.dumps(PROMPT), json.dumps({"prompt": TEXT + "one"}), json.dumps(TEXT + "two")]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    common = ("run", str(folder), "--max-tokens", "20")
    plain = run(*common, "--prompts", str(tmp_path / "prompts.txt"))
    assert plain.returncode == 0, plain.stderr
    assert f"[3] {TEXT}two\n" in plain.stdout
    guessing = run(
        *common, "--prompts", str(tmp_path / "prompts.jsonl"), "--speculate", "4", "--schedule", "depth-first"
    )
    assert guessing.stdout == plain.stdout
    assert "guesses that held" in guessing.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--num-samples", "0"), "n: expected an integer from 1"),
        (("--min-p", "2"), "min_p: expected 0 or more, at most 1, got 2.0"),
        (("--repetition-penalty", "0"), "repetition_penalty: expected more than 0, got 0.0"),
        (
            ("--logit-bias", "five"),
            "--logit-bias: expected a token id and a number, such as 42=-1.5, got 'five'",
        ),
        (("--logit-bias", "99999999=1"), "logit_bias: expected token ids below"),
        (("--beams", "2", "--temperature", "1"), "temperature: expected 0 beside num_beams, got 1.0"),
        (("--schedule", "lifo"), "schedule: expected one of 'fcfs', 'longest-prefix', 'depth-first'"),
        (("--deadline-s", "-1"), "deadline_s: expected a finite number of at least 0"),
        (("--prompts", "no/such/file.txt"), "--prompts: expected a text file, got"),
    ],
)
def test_wrong_request_is_one_sentence(
    folder: Path,
    arguments: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    test_wrong_option_is_one_sentence(folder, arguments, message, monkeypatch, capfd)


@pytest.mark.parametrize(
    ("name", "contents", "message"),
    [
        ("empty.txt", "\n \n", "--prompts: expected at least one prompt, got none, in "),
        ("broken.jsonl", '"a"\n{"prompt":', "--prompts: expected JSON, got "),
        ("other.jsonl", "[1]", "--prompts: expected a text or an object with a prompt, got [1] (list), in "),
    ],
)
def test_file_without_prompts_is_refused(tmp_path: Path, name: str, contents: str, message: str) -> None:
    (tmp_path / name).write_text(contents, encoding="utf-8")
    with pytest.raises(UsageError) as refusal:
        read_prompts(tmp_path / name)
    assert str(refusal.value).startswith(message)
    assert name in str(refusal.value)


def test_command_without_a_prompt_is_refused(folder: Path) -> None:
    assert "--prompt: expected at least one" in one_sentence(run("run", str(folder)))
