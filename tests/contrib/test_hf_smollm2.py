"""A real model and real text: SmolLM2-135M-Instruct, with attention over gathered pages and in place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architectures import RELEASE
from generating import paged, plain

pytest.importorskip("accelerate")
pytest.importorskip("gguf")

from pagedkv.contrib.hf import PagedCache, generate_many
from pagedkv.runner.bundled import bundled_model_path

pytestmark = pytest.mark.slow
HANDBOOK = Path(__file__).parents[2] / "pagedkv" / "cli" / "handbook.md"
DTYPE = "dtype" if RELEASE >= (4, 56) else "torch_dtype"
QUESTIONS = ("What is a block?", "What is a page?", "When is a page evicted?")


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    """Return the model in float32 and its tokenizer."""
    path = bundled_model_path()
    options: dict[str, Any] = {"gguf_file": path.name, DTYPE: torch.float32}
    quantization = pytest.importorskip("transformers.utils.quantization_config")
    if hasattr(quantization, "GgufConfig"):  # what came before unpacked the weights always
        options["quantization_config"] = quantization.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, **options).eval()
    return model, transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def prompt(tokenizer: Any, question: str) -> torch.Tensor:
    """Return ids [1, about 900] of a chat about a real text."""
    text = HANDBOOK.read_text(encoding="utf-8")[:3500]
    messages = [{"role": "system", "content": text}, {"role": "user", "content": question}]
    chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer(chat, return_tensors="pt", add_special_tokens=False)["input_ids"]


def attend_by(model: Any, attention: str) -> None:
    """Choose the attention of a model that was loaded with sdpa, as models do unless told otherwise."""
    if hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation(attention)
    elif attention != "sdpa":
        pytest.skip("a loaded model's attention can be chosen from 4.54 on")


@pytest.mark.parametrize("attention", ["sdpa", "eager", "pagedkv"])
def test_answers_about_a_text_are_those_of_the_dynamic_cache(loaded: tuple[Any, Any], attention: str) -> None:
    model, tokenizer = loaded
    attend_by(model, "sdpa")
    prompts = [prompt(tokenizer, question) for question in QUESTIONS]
    expected = [plain(model, ids, 24) for ids in prompts]
    attend_by(model, attention)
    with PagedCache.for_model(model, num_blocks=200) as cache:
        found = []
        for ids, answer in zip(prompts, expected, strict=True):
            out, [cached] = paged(cache, ids, 24)
            assert torch.equal(out, answer)
            found.append(cached)
        assert found[0] == 0
        assert min(found[1:]) > 0.9 * prompts[0].shape[1]
        report = generate_many(
            model, [ids[0].tolist() for ids in prompts], cache=cache, progress=False, max_new_tokens=24,
            do_sample=False, tokenizer=tokenizer,
        )  # fmt: skip
        for answer, full, ids in zip(report.answers, expected, prompts, strict=True):
            assert answer.token_ids == full[0, ids.shape[1] :].tolist()[: len(answer.token_ids)]
            assert answer.text
    attend_by(model, "sdpa")
