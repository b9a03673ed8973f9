"""The examples run as they are, and print what they promise."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
LONGEST_ENGINE = 150  # lines


def output_of(name: str) -> str:
    """Run an example as a user does."""
    # On a busy machine torch's threads would wait for each other by spinning.
    environment = os.environ | {"OMP_WAIT_POLICY": "passive", "PYTHONWARNINGS": "error"}
    command = [sys.executable, str(EXAMPLES / name)]
    return subprocess.run(
        command, env=environment, check=True, capture_output=True, text=True, timeout=280
    ).stdout


def test_a_pool_alone_finds_prefixes_to_the_token_and_says_why_one_is_gone() -> None:
    output = output_of("01_pool_only.py")
    assert re.findall(r"^.{20}\s*(\d+)", output, re.MULTILINE)[:3] == ["0", "992", "700"]
    known, there = re.search(r"a router knows of +(\d+) blocks, the pool has (\d+)", output).groups()
    assert known == there
    assert "was evicted to make room" in output


def test_tenants_share_the_public_prompt_and_nothing_else() -> None:
    output = output_of("03_multi_tenant.py")
    reads = [int(n.replace(",", "")) for n in re.findall(r"tokens: +([\d,]+) read", output)]
    assert reads[:2] == [0, 2_048]
    assert min(reads[2:]) > 3_000
    assert "2,048 of 3,648 tokens found" in output


@pytest.mark.parametrize("name", ["02_tiny_engine.py", "04_speculative.py"])
def test_an_engine_fits_on_two_pages(name: str) -> None:
    assert len((EXAMPLES / name).read_text(encoding="utf-8").splitlines()) < LONGEST_ENGINE


def test_the_tiny_engine_answers_the_same_from_the_cache() -> None:
    cold, warm = output_of("02_tiny_engine.py").split("warm: ")
    answers = re.findall(r"tokens cached: (.+)$", warm, re.MULTILINE)
    assert answers == re.findall(r"tokens cached: (.+)$", cold, re.MULTILINE)
    assert len(answers) == 3
    assert all(
        int(n) >= int(size) - 1
        for n, size in re.findall(r"^ +(\d+) of (\d+) tokens cached", warm, re.MULTILINE)
    )


def test_guesses_save_steps_and_change_no_answer() -> None:
    output = output_of("04_speculative.py")  # compares the answers itself
    without, with_guesses = (int(n) for n in re.findall(r"a step: (\d+) steps", output))
    assert with_guesses < without == 48


@pytest.mark.slow
def test_transformers_give_the_same_tokens_from_the_cache() -> None:
    output = output_of("05_transformers.py")  # compares the answers itself
    cached = [(int(n), int(of)) for n, of in re.findall(r"(\d+) of (\d+) tokens cached", output)]
    assert cached[0][0] == 0
    assert all(n > 0.9 * of for n, of in cached[1:])
    assert "prompt tokens were cached" in output


def test_kernels_of_others_are_shown_what_they_would_be_given() -> None:
    output = output_of("06_flashinfer.py")
    assert "288 of 320 tokens cached" in output
    assert "256 of 320 tokens cached" in output
