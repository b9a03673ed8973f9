"""Two processes that compute one model answer as one does, and end together when either fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from command import run as run_command
from rank_program import answers
from tiny_folders import write_tiny_folder
from tiny_models import TINY, all_logits, random_tensors, random_tokens
from torch.distributed import TCPStore

pytest.importorskip("transformers")

from tiny_transformers import VARIANTS, VOCAB_SIZE, save_reference

from pagedkv.errors import UsageError
from pagedkv.runner.config import ModelConfig
from pagedkv.runner.loader import load_model
from pagedkv.runner.shard import Shard
from pagedkv.runner.weights import tensor_shapes

PROGRAM = Path(__file__).with_name("rank_program.py")
# Uneven heads, one KV head for both, biases behind the sums, norms of heads, norms behind the sums, windows.
MODELS = ["llama_untied", "llama_one_kv_head", "llama_biases", "qwen3", "gemma2", "gemma3"]


def run_ranks(*arguments: str, size: int = 2) -> list[subprocess.CompletedProcess[str]]:
    """Run the program as `size` processes; return what became of each."""
    # The store is ours, as torchrun's is torchrun's: a port that was only looked for may be gone when rank 0
    # wants to listen there.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(size),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, **shared, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
        )
        for rank in range(size)
    ]  # fmt: skip
    ended = []
    for process in processes:
        out, err = process.communicate(timeout=200)
        ended.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
    return ended


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_folder(tmp_path_factory.mktemp("rank") / "tiny", text="the lamps of the harbour"))


def test_answers_equal_those_of_one_process_cold_warm_and_preempted(tmp_path: Path) -> None:
    for name in MODELS:
        save_reference(name, tmp_path / name)
    first = random_tokens(60, seed=4, vocab_size=VOCAB_SIZE)
    inside_a_block = [*first[:37], *random_tokens(9, seed=5, vocab_size=VOCAB_SIZE)]
    prompts = [first, inside_a_block, first]
    ended = run_ranks(
        "answer_all", *(str(tmp_path / name) for name in MODELS), json.dumps(prompts), str(tmp_path / "out")
    )
    assert [process.returncode for process in ended] == [0, 0], [process.stderr for process in ended]
    given = json.loads((tmp_path / "out").read_text())
    for name in MODELS:
        model = load_model(tmp_path / name).model
        expected = answers(model, prompts, 12)
        assert sum(each["preemptions"] for each in expected) > 0
        for ours, theirs in zip(given[name], expected, strict=True):
            assert ours["cached"] == theirs["cached"]
            for answer, other in zip(ours["answers"], theirs["answers"], strict=True):
                if answer != other:
                    assert_as_likely(model, ours["prompt"], answer, other)
        assert [each["cached"] for each in given[name][:3]] == [0, 37, 59]


def assert_as_likely(model: Any, prompt: list[int], answer: list[int], other: list[int]) -> None:
    """Two sums in another order may choose differently where two tokens are as good as equal."""
    place = next(i for i, (a, b) in enumerate(zip(answer, other, strict=True)) if a != b)
    logits = all_logits(model, [*prompt, *answer[:place]])[-1]
    assert abs(float(logits[answer[place]] - logits[other[place]])) < 1e-4, place


@pytest.mark.parametrize(
    ("who", "how", "reason"),
    [
        (1, "raise", "rank 1: MemoryError: not enough for step 3"),
        pytest.param(0, "raise", "rank 0: MemoryError: not enough for step 3", marks=pytest.mark.slow),
        pytest.param(1, "vanish", "", marks=pytest.mark.slow),
    ],
)
def test_failure_of_one_rank_ends_all_with_its_reason(
    tiny_folder: str, who: int, how: str, reason: str
) -> None:
    ended = run_ranks("fail", tiny_folder, str(who), how)
    failed, other = ended[who], ended[1 - who]
    assert failed.returncode == (9 if how == "vanish" else 3), failed.stderr
    if how == "raise":
        assert failed.stdout == "MemoryError: not enough for step 3\n"
    assert other.returncode == 3, other.stderr
    assert other.stdout.startswith("RankError: processes: expected all to go on, got ")
    assert reason in other.stdout


@pytest.mark.slow
def test_what_rank_0_refuses_ends_the_others_too(tiny_folder: str) -> None:
    leader, follower = run_ranks("refuse", tiny_folder)
    assert (leader.returncode, follower.returncode) == (3, 3)
    assert leader.stdout.startswith("UsageError: request: expected at most 2 pages")
    assert "got an end: rank 0 failed: UsageError: request: expected at most 2 pages" in follower.stdout


@pytest.mark.slow
def test_command_line_under_torchrun_prints_one_answer(tiny_folder: str) -> None:
    arguments = ("run", tiny_folder, "--prompt", "the lamps", "--max-tokens", "9")
    alone = run_command(*arguments)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    result = subprocess.run(
        [*torchrun, "-m", "pagedkv", *arguments], capture_output=True, text=True, timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout == alone.stdout


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("name", ["llama", "llama_one_kv_head", "llama_as_many_kv_heads"])
def test_shards_are_the_model_in_parts(name: str, size: int) -> None:
    num_kv_heads = VARIANTS[name].changes.get("num_key_value_heads", 2)
    config = ModelConfig(**{**TINY.__dict__, "num_kv_heads": num_kv_heads, "tie_word_embeddings": False})
    shards = [Shard.of(config, rank, size) for rank in range(size)]
    for attribute, count in (
        ("heads", config.num_heads), ("inner", config.intermediate_size), ("vocab", config.vocab_size),
    ):  # fmt: skip
        parts = [getattr(shard, attribute) for shard in shards]
        assert [index for part in parts for index in part] == list(range(count))
        assert all(len(part) for part in parts)
    group = config.num_heads // num_kv_heads
    whole = random_tensors(config)
    for shard in shards:
        assert {head // group for head in shard.heads} == set(shard.kv_heads)  # it has what its heads read
        shapes = tensor_shapes(shard.config)
        cut = {key: shard.cut(key, tensor) for key, tensor in whole.items()}
        head = cut.pop("lm_head.weight")
        assert torch.equal(head, whole["lm_head.weight"][shard.vocab.start : shard.vocab.stop])
        assert {key: tuple(tensor.shape) for key, tensor in cut.items()} == {
            key: shape for key, shape in shapes.items() if key != "lm_head.weight"
        }


def test_more_processes_than_heads_are_refused() -> None:
    with pytest.raises(UsageError, match=r"processes: expected at most 6 \(the heads of tiny\), got 7"):
        Shard.of(TINY, 0, 7)
