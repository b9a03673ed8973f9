"""Speculative decoding: guesses are verified several at once, and the wrong ones leave no trace in the cache.

The guesses come from the text itself: what followed the last words the last time. Greedy answers are the
same with guesses and without.
"""

from __future__ import annotations

import sys
import time

from pagedkv import PagedKVCache
from pagedkv.runner import Model, load_model
from pagedkv.runner.bundled import bundled_model_path
from pagedkv.runner.drafting import PromptLookup


def decode(model: Model, prompt: list[int], num_new_tokens: int, num_guesses: int) -> tuple[list[int], int]:
    """Return a greedy answer and how many steps it took."""
    spec = model.config.kv_spec(str(model.dtype).removeprefix("torch."))
    cache = PagedKVCache(spec, num_blocks=256, namespace=model.namespace)
    lookup, text, num_steps = PromptLookup(), list(prompt), 0
    seq = cache.open(prompt)
    while len(text) - len(prompt) < num_new_tokens:
        guesses = lookup.draft(text, num_guesses) if num_steps and num_guesses else []
        if guesses:
            cache.append(seq, guesses)
        step = cache.reserve(seq, seq.num_uncached_tokens)
        meta = cache.prepare(step)
        hidden = model.forward(cache, meta)
        # A token for every position from the last sure one on: what follows it, and what follows each guess.
        chosen = model.logits(hidden[-1 - len(guesses) :]).argmax(-1).tolist()
        num_right = 0
        while num_right < len(guesses) and guesses[num_right] == chosen[num_right]:
            num_right += 1
        # Wrong guesses are cut off and never published; their pages are overwritten or given back.
        cache.commit(step, len(hidden) - (len(guesses) - num_right))
        text += chosen[: num_right + 1]
        cache.append(seq, [chosen[num_right]])
        num_steps += 1
    cache.close(seq)
    cache.check_integrity()
    return text[len(prompt) :][:num_new_tokens], num_steps


def main(path: str) -> None:
    """Copy a list, a task full of repetition, with guesses and without."""
    model, tokenizer = load_model(path)
    assert tokenizer is not None, "the file has no tokenizer"
    items = " ".join(f"The {animal} sleeps." for animal in ("cat", "dog", "owl", "fox", "hen", "cow", "pig"))
    prompt = tokenizer.encode_chat([{"role": "user", "content": f"Repeat this word by word: {items}"}])
    answers = []
    for num_guesses in (0, 6):
        start_s = time.perf_counter()
        answer, num_steps = decode(model, prompt, 48, num_guesses)
        print(f"{num_guesses} guesses a step: {num_steps} steps, {time.perf_counter() - start_s:.2f} s")
        answers.append(answer)
    assert answers[0] == answers[1], "a guess must not change a greedy answer"
    print(tokenizer.decode(answers[0]))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else str(bundled_model_path()))
