"""`pagedkv lint` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import one_sentence, run

RULES = " ".join(f"Rule {i}: answer a question of kind {i % 7} by document {i * 7}." for i in range(40))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    lines = [{"prompt": f"Now: 2026-11-0{n}T10:00:00Z [ok].\n{RULES}"} for n in range(1, 6)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_json_ranks_what_was_lost_and_needs_no_torch(log: Path) -> None:
    result = run("lint", str(log), "--json", hide=("torch", "tokenizers"))
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    [finding] = report["findings"]
    assert (finding["cause"], finding["num_prompts"]) == ("timestamp", 4)
    assert finding["new"] == " 2026-11-02T10:00:00Z" or finding["new"] == "2026-11-02T10:00:00Z"
    assert (finding["where"], finding["against"]) == (f"{log}, line 2", f"{log}, line 1")
    assert 0 < finding["lost_tokens"] == report["lost_tokens"] < report["num_tokens"]


def test_the_table_shows_the_place_and_what_to_do(log: Path) -> None:
    result = run("lint", str(log))
    assert result.returncode == 0, result.stderr
    for shown in ("5 prompts", "lost behind a difference", "timestamp:", "2026-11-02", "end of the prompt"):
        assert shown in result.stdout


def test_a_real_tokenizer_finds_the_same(log: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([RULES], trainer)
    file = tmp_path / "tokenizer.json"
    tokenizer.save(str(file))
    result = run("lint", str(log), "--tokenizer", str(file), "--json")
    assert result.returncode == 0, result.stderr
    [finding] = json.loads(result.stdout)["findings"]
    assert finding["cause"] == "timestamp"
    assert finding["lost_tokens"] >= 4 * len(tokenizer.encode(RULES).ids)


def test_token_ids_are_shown_as_numbers(tmp_path: Path) -> None:
    file = tmp_path / "ids.jsonl"
    lines = [{"token_ids": [n, *range(100, 200)]} for n in (7, 8)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    [finding] = json.loads(run("lint", str(file), "--json").stdout)["findings"]
    assert (finding["old_token"].strip(), finding["new_token"].strip()) == ("7", "8")
    assert finding["lost_tokens"] == 100


def test_a_bad_line_is_told_and_left_out_or_refused(log: Path) -> None:
    with log.open("a") as file:
        file.write('{"prompt": 5}\n')
    kept = run("lint", str(log), "--json")
    assert json.loads(kept.stdout)["num_prompts"] == 5
    assert f"{log}, line 6" in kept.stderr
    assert f"{log}, line 6" in one_sentence(run("lint", str(log), "--strict"))


def test_what_is_wrong_is_one_sentence(log: Path, tmp_path: Path) -> None:
    assert "expected a readable file" in one_sentence(run("lint", str(tmp_path / "none")))
    assert "--tokenizer: expected a tokenizer.json" in one_sentence(
        run("lint", str(log), "--tokenizer", str(log))
    )
    assert "--top: expected at least 1" in one_sentence(run("lint", str(log), "--top", "0"))
