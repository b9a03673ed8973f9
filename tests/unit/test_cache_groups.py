"""A cache with groups of layers: what layers with windows compute from pages is what tokens alone give."""

from __future__ import annotations

import attention_oracle
import numpy as np
import pytest
import torch
import toy_model
from toy_model import ToyModel

from pagedkv import BatchShape, KVCacheSpec, KVGroup, KVPages, OutOfBlocksError, PagedKVCache, UsageError

WINDOWS = {"full + window": (None, 9), "one window": (6, 6), "two windows": (5, 16), "full": (None, None)}


class WindowModel(ToyModel):
    """The toy model; layer i sees ``windows[i]`` tokens."""

    def __init__(self, windows: tuple[int | None, int | None]) -> None:
        super().__init__()
        self.windows = windows

    def cache(self, num_blocks: int | list[int], **options: object) -> PagedKVCache:
        """With a group for each window."""
        groups = tuple(
            KVGroup(
                tuple(i for i, own in enumerate(self.windows) if own == window),
                toy_model.NUM_KV_HEADS,
                toy_model.HEAD_DIM,
                window=window,
            )
            for window in dict.fromkeys(self.windows)
        )
        return PagedKVCache(KVCacheSpec(groups, block_size=4), num_blocks, **options)  # type: ignore[arg-type]

    def expected_logits(self, token_ids: list[int]) -> np.ndarray:  # type: ignore[override]
        key = tuple(token_ids)
        if key not in self._expected:
            h = self.tokens[list(key)] + self.places[: len(key)]
            for layer, window in enumerate(self.windows):
                q = (h @ self.q[layer]).reshape(-1, toy_model.NUM_HEADS, toy_model.HEAD_DIM)
                k = (h @ self.k[layer]).reshape(-1, toy_model.NUM_KV_HEADS, toy_model.HEAD_DIM)
                v = (h @ self.v[layer]).reshape(-1, toy_model.NUM_KV_HEADS, toy_model.HEAD_DIM)
                attended, _ = attention_oracle.attend_with_lse(q, k, v, window=window)
                h = np.tanh(h + attended.reshape(len(key), -1) @ self.o[layer])
            self._expected[key] = h[-1] @ self.head
        return self._expected[key]


MODELS = {name: WindowModel(windows) for name, windows in WINDOWS.items()}


def chat(
    model: WindowModel, cache: PagedKVCache, prompt: list[int], num_tokens: int, chunk: int = 100
) -> tuple[list[int], int]:
    """A greedy answer, computed in pieces and checked at every step; and how much of the prompt was found."""
    with cache.open(prompt) as seq:
        found, answer = seq.num_cached_tokens, list[int]()
        while len(answer) < num_tokens:
            logits = model.step(cache, seq, [min(chunk, seq.num_uncached_tokens)])
            cache.check_integrity()
            if not seq.num_uncached_tokens:
                answer.append(int(logits[0].argmax()))
                cache.append(seq, answer[-1])
    return answer, found


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("num_blocks", [[60, 60], [24, 14]], ids=["plenty", "few"])
def test_warm_answers_equal_cold_ones(name: str, num_blocks: list[int]) -> None:
    model, rng = MODELS[name], np.random.default_rng(3)
    groups = len(dict.fromkeys(model.windows))
    warm = model.cache(num_blocks[:groups])
    cold = model.cache(num_blocks[:groups], prefix_caching=False)
    prefix = rng.integers(1, toy_model.VOCABULARY, 30).tolist()
    total = 0
    for turn in range(8):
        prompt = prefix[: 30 - turn % 3] + rng.integers(1, toy_model.VOCABULARY, 1 + 3 * (turn % 4)).tolist()
        answer, found = chat(model, warm, prompt, 7, chunk=[100, 5][turn % 2])
        assert answer == chat(model, cold, prompt, 7, chunk=9)[0]
        again, found_again = chat(model, warm, prompt + answer, 2)
        assert again == chat(model, cold, prompt + answer, 2)[0]
        total += found + found_again
    assert total > 8 * 30, "reuse paid"
    assert cold.stats().num_cached_tokens == 0


@pytest.mark.parametrize("name", WINDOWS)
def test_several_sequences_of_one_step_have_their_own_windows(name: str) -> None:
    model = MODELS[name]
    cache = model.cache(80)
    prefix = list(range(1, 22))
    chat(model, cache, prefix, 1)
    seqs = [cache.open(prefix[:n] + [n % 20 + 1] * 3) for n in (21, 20, 14, 3)]
    for _ in range(12):
        logits = model.step(cache, seqs)
        cache.append(seqs, logits.argmax(-1).tolist())
        cache.check_integrity()
    fork = cache.pool.fork(seqs[0])
    cache.append([seqs[0], fork], [1, 2])
    model.step(cache, [fork, *seqs])
    cache.truncate(seqs[1], 11)
    cache.append(seqs[1], 5)
    model.step(cache, seqs[1])


def test_a_run_is_copied_in_every_group() -> None:
    model = MODELS["full + window"]
    cache = model.cache(40)
    chat(model, cache, list(range(1, 19)), 1)
    seq = cache.open([*range(1, 15), 20, 21, 22])
    assert seq.num_cached_tokens == 14
    model.step(cache, seq)


def test_fixed_shapes_hold_the_tables_of_all_groups() -> None:
    model, shape = MODELS["full + window"], BatchShape(num_seqs=3, num_tokens=24, max_blocks=12)
    cache = model.cache(40)
    seq = cache.open(list(range(1, 22)))
    addresses = set()
    for _ in range(4):
        step = cache.reserve(seq, seq.num_uncached_tokens)
        meta = cache.prepare(step, shape=shape)
        local = meta.group(1)
        assert local.block_table.shape == (3, 12)
        assert local.block_table[1:].eq(-1).all()
        assert local.slot_mapping[step.num_tokens :].eq(-1).all()
        addresses.add((local.block_table.data_ptr(), local.slot_mapping.data_ptr()))
        hidden = model.hidden(cache, meta)
        logits = hidden[meta.last_token_index[0]] @ model.weights["head"]
        np.testing.assert_allclose(logits, model.expected_logits(seq.token_ids.tolist()), atol=2e-4)
        cache.commit(step)
        cache.append(seq, int(logits.argmax()))
    assert len(addresses) == 1


def test_a_layer_sees_the_window_of_its_group_or_less() -> None:
    model = MODELS["full + window"]
    cache = model.cache(20)
    step = cache.reserve(cache.open([1, 2, 3]), 3)
    meta = cache.prepare(step)
    query = torch.zeros(3, toy_model.NUM_HEADS, toy_model.HEAD_DIM)
    key = torch.zeros(3, toy_model.NUM_KV_HEADS, toy_model.HEAD_DIM)
    cache.write(1, key, key, meta)
    assert cache.attend(1, query, meta, window=2).shape == query.shape
    with pytest.raises(UsageError, match="attend: window: expected an integer from 1 to 9, got 10"):
        cache.attend(1, query, meta, window=10)


def test_groups_differ_in_heads_and_dtype() -> None:
    groups = (KVGroup((0, 2), 2, 8), KVGroup((1,), 1, 16, "bfloat16", window=8))
    cache = PagedKVCache(KVCacheSpec(groups, block_size=4), [6, 3])
    assert [pages[0].shape for pages in (cache.pages[0], cache.pages[1])] == [(6, 4, 2, 8), (3, 4, 1, 16)]
    assert cache.pages[1][0].dtype == torch.bfloat16
    assert cache.pages.size_bytes == 6 * 4 * groups[0].bytes_per_token + 3 * 4 * groups[1].bytes_per_token
    with pytest.raises(UsageError, match=r"blocks: expected pages of one group, .* got 2 groups"):
        _ = cache.pages.blocks
    assert [pages.num_blocks for pages in cache.pages.groups] == [6, 3]
    assert cache.pool.num_blocks_by_group == (6, 3)


def test_a_window_serves_prompts_longer_than_its_pages() -> None:
    model = MODELS["one window"]
    cache = model.cache(8)  # 32 tokens
    assert len(chat(model, cache, [i % 20 + 1 for i in range(100)], 30, chunk=6)[0]) == 30
    with pytest.raises(OutOfBlocksError):
        cache.reserve(cache.open([1] * 40), 40)


def test_pages_are_split_among_groups_by_memory() -> None:
    spec = KVCacheSpec((KVGroup((0,), 1, 8), KVGroup((1,), 1, 8, window=32)))
    counts = spec.split("64KiB", num_tokens=1024, step_tokens=16)
    pages = KVPages(spec, counts)
    assert pages.size_bytes <= 64 * 1024
    assert [group.num_blocks for group in pages.groups] == list(counts)
    assert counts[0] > 10 * counts[1]
