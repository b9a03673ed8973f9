"""Who may find what: mistakes that other KV caches made in naming blocks, as promises that this pool keeps.

Where something must miss, the same data must hit as well: a pool that never hits keeps every secret.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from pool_driving import NotedKV, compute, digests, num_block_tokens, observe, remember, run

from pagedkv import Adapter, BlockPool, Embeddings, Extra, Media, UsageError, hash_blocks
from pagedkv.testing import broken_hashes

ZERO_TO_31 = list(range(32))
ZERO_TO_47 = list(range(48))


# ---------------------------------------------------------------------- tokens


def test_token_ids_that_agree_in_their_low_bits_share_no_block() -> None:
    """Ids were cut to 8 bits on their way into the hash, so 65 and 321 were one token (vllm-mlx)."""
    pool = BlockPool(16)
    prompts = [[token] * 16 for token in (65, 321, 65 + 2**16, 2**32 - 1)]
    for i, prompt in enumerate(prompts):
        assert pool.match(prompt).num_tokens == 0
        remember(pool, prompt)
        assert [num_block_tokens(pool, p) for p in prompts] == [16] * (i + 1) + [0] * (3 - i)


@pytest.mark.parametrize("token", [65 + 2**32, -1, 2**63])
def test_a_token_id_too_wide_is_refused_before_anything_is_scheduled(token: int) -> None:
    """Wide ids overflowed a message, or the type of a tensor, in the middle of a step (LMCache)."""
    pool = BlockPool(16)
    remember(pool, [65] * 16)
    before = observe(pool)
    with pytest.raises(UsageError, match=f"token_ids: expected .*got {token}, at index 0"):
        pool.open([token] * 16)
    assert observe(pool) == before
    assert num_block_tokens(pool, [65] * 16) == 16


@pytest.mark.parametrize("dtype", ["u1", "i2", "i4", "i8", "u8", ">i4", "O"])
def test_a_block_is_found_whatever_integer_type_its_tokens_come_in(dtype: str) -> None:
    pool = BlockPool(4)
    remember(pool, np.array([65] * 16, dtype))
    assert num_block_tokens(pool, [65] * 16) == 16
    assert num_block_tokens(pool, np.array([65] * 16, dtype)) == 16


# ---------------------------------------------------------------------- media and embeddings


def test_two_pictures_behind_the_same_placeholders_share_no_block() -> None:
    """A picture's id was folded to 16 bits, repeated over its placeholders; others had the same (LMCache)."""
    pool = BlockPool(16)
    prompt = [1, 2, 3, 4, *[151655] * 40, 5, 6, 7, 8]
    one, other = (Media(4, 40, bytes.fromhex(first * 60 + "abcd")) for first in "01")
    remember(pool, prompt, extras=[one])
    assert num_block_tokens(pool, prompt, extras=[other]) == 0
    assert pool.match(prompt, extras=[other]).num_tokens == 4  # the text before the picture
    assert pool.match(prompt).num_tokens == 4
    assert num_block_tokens(pool, prompt, extras=[one]) == 48
    remember(pool, prompt, extras=[other])
    assert num_block_tokens(pool, prompt, extras=[one]) == 48
    assert len(set(digests(pool)) - {None}) == 6


@pytest.mark.parametrize("kind", ["media", "embeddings"])
def test_an_item_is_found_only_with_its_content_at_its_place(kind: str) -> None:
    """Among equal placeholders, where an item begins decides the KV as much as what it is."""

    def item(start: int, content: bytes) -> Media | Embeddings:
        digest = sha256(content).digest()
        if kind == "media":
            return Media(start, 36, digest)
        return Embeddings(range(start, start + 36), digest)

    pool, prompt = BlockPool(16), [7] * 48
    remember(pool, prompt, extras=[item(4, b"cat")])
    for others in ([item(5, b"cat")], [item(3, b"cat")], [item(4, b"dog")], []):
        assert num_block_tokens(pool, prompt, extras=others) == 0
    assert num_block_tokens(pool, prompt, extras=[item(4, b"cat")]) == 48


# ---------------------------------------------------------------------- adapters


def test_an_adapter_loaded_again_with_new_weights_finds_nothing_of_the_old() -> None:
    """Adapters were told apart by name alone: a reload with other weights read the old KV (vLLM)."""
    pool = BlockPool(16)
    old, new = (Adapter("sql", sha256(weights).digest()) for weights in (b"w1", b"w2"))
    remember(pool, ZERO_TO_31, extras=[old])
    assert pool.match(ZERO_TO_31, extras=[new]).num_tokens == 0
    remember(pool, ZERO_TO_31, extras=[new])
    assert num_block_tokens(pool, ZERO_TO_31, extras=[old]) == 32
    assert num_block_tokens(pool, ZERO_TO_31, extras=[new]) == 32


@pytest.mark.parametrize("first", [[], [Adapter("sql", b"1")]], ids=["the base", "an adapter"])
def test_base_and_adapter_find_nothing_of_each_other(first: list[Adapter]) -> None:
    pool = BlockPool(16)
    second = [] if first else [Adapter("sql", b"1")]
    remember(pool, ZERO_TO_31, extras=first)
    assert pool.match(ZERO_TO_31, extras=second).num_tokens == 0
    assert num_block_tokens(pool, ZERO_TO_31, extras=first) == 32


def test_an_adapters_blocks_have_the_same_digests_wherever_and_in_whatever_order_it_was_loaded() -> None:
    """A number given in the order of loading named adapters, so instances never shared a block (vLLM)."""
    x, y = Adapter("x", b"1"), Adapter("y", b"1")
    names = []
    for order in ([x, y], [y, x]):
        pool = BlockPool(16)
        for adapter in order:
            remember(pool, ZERO_TO_31, extras=[adapter])
        names.append([pool.digest_of(i) for i in pool.match(ZERO_TO_31, extras=[y]).block_ids])
    assert names[0] == names[1]
    assert len(names[0]) == 2


# ---------------------------------------------------------------------- salts


def test_a_salt_keeps_tenants_apart_and_each_hits_its_own() -> None:
    """One tenant could tell from a hit what another had asked (vLLM)."""
    pool = BlockPool(16)
    remember(pool, ZERO_TO_47, cache_salt="s1")
    assert num_block_tokens(pool, ZERO_TO_47, cache_salt="s1") == 48
    assert pool.match(ZERO_TO_47, cache_salt="s2").num_tokens == 0
    assert pool.match(ZERO_TO_47).num_tokens == 0
    remember(pool, ZERO_TO_47)
    assert num_block_tokens(pool, ZERO_TO_47) == 48
    assert pool.match(ZERO_TO_47, cache_salt="s2").num_tokens == 0
    assert pool.open(ZERO_TO_47, cache_salt="s2").num_cached_tokens == 0
    assert len(set(digests(pool)) - {None}) == 6


def test_a_salt_separates_every_block_of_a_prompt_and_not_only_the_first() -> None:
    chains = []
    for salt in ("s1", "s2", None):
        pool = BlockPool(16)
        with compute(pool, ZERO_TO_47, cache_salt=salt) as seq:
            chains.append(seq.block_hashes)
    assert [len(chain) for chain in chains] == [3, 3, 3]
    assert all(len(set(blocks)) == 3 for blocks in zip(*chains, strict=True))


def test_a_tenant_cannot_guess_anothers_prompt_token_by_token() -> None:
    """Partial runs would tell more than whole blocks do, if they crossed from salt to salt."""
    pool = BlockPool(16)
    secret = [900 + token for token in ZERO_TO_31]
    remember(pool, secret, cache_salt="s1")
    for num_guessed in (1, 7, 16, 23, 32):
        guess = secret[:num_guessed] + [5] * 4
        assert pool.match(guess, cache_salt="s1").num_tokens == num_guessed
        for options in ({"cache_salt": "s2"}, {}, {"extras": [Adapter("s1", b"1")]}):
            assert pool.match(guess, **options).num_tokens == 0
            assert pool.touch(guess, **options) == 0
            assert pool.open(guess, **options).num_cached_tokens == 0


def test_no_two_kinds_of_extras_meet_whatever_their_bytes() -> None:
    """Parts of a key were joined by separators, so that one tenant's salt could spell another's key."""
    separate: list[dict[str, Any]] = [
        {"cache_salt": "ab"},
        {"cache_salt": "a", "extras": [Extra(128, b"b")]},
        {"cache_salt": b"\x01\x02\x00\x00\x00ab"},  # how the first is encoded
        {"extras": [Extra(128, b"ab")]},
        {"extras": [Extra(129, b"ab")]},
        {"extras": [Extra(128, b"a"), Extra(128, b"b")]},
        {"extras": [Adapter("ab", b"r")]},
        {"extras": [Adapter("a", b"br")]},
        {},
    ]
    pool = BlockPool(2 * len(separate))
    for i, options in enumerate(separate):
        assert pool.match(ZERO_TO_31, **options).num_tokens == 0, options
        remember(pool, ZERO_TO_31, **options)
        assert [num_block_tokens(pool, ZERO_TO_31, **o) for o in separate[: i + 1]] == [32] * (i + 1)
    assert len(set(digests(pool))) == 2 * len(separate)


# ---------------------------------------------------------------------- weights that change


def test_after_new_weights_nothing_old_is_found_and_a_running_request_finishes() -> None:
    """Weights were swapped in place and the cache was kept (lmdeploy, vllm-omni)."""
    pool = BlockPool(16)
    remember(pool, ZERO_TO_31)
    assert num_block_tokens(pool, ZERO_TO_31) == 32
    pool.bump_generation()
    assert pool.match(ZERO_TO_31).num_tokens == 0
    remember(pool, ZERO_TO_31)
    running = compute(pool, [*ZERO_TO_31, 32])
    assert running.num_cached_tokens == 32
    pool.bump_generation()
    running.append(range(33, 48))
    tables = run(pool, running)
    assert (running.num_computed_tokens, tables.seq_lens.tolist()) == (48, [48])
    assert pool.match(ZERO_TO_47).num_tokens == 0
    running.close()
    assert pool.match(ZERO_TO_47).num_tokens == 0
    remember(pool, ZERO_TO_47)
    assert num_block_tokens(pool, ZERO_TO_47) == 48


def test_a_reset_that_cannot_be_done_says_no_and_changes_nothing() -> None:
    """The call to reset was a stub, or answered success although it had refused (vLLM)."""
    pool = BlockPool(16)
    remember(pool, ZERO_TO_31, list(range(100, 132)))
    seq = pool.open(ZERO_TO_31)
    before = observe(pool, seq)
    assert pool.reset() is False
    assert observe(pool, seq) == before
    assert num_block_tokens(pool, ZERO_TO_31) == num_block_tokens(pool, range(100, 132)) == 32
    seq.close()
    assert pool.reset() is True
    assert pool.match(ZERO_TO_31).num_tokens == 0
    assert pool.stats().num_free_blocks == 16


# ---------------------------------------------------------------------- digests that collide


def test_a_prompt_whose_digests_equal_anothers_is_never_served_its_kv() -> None:
    """A page was known by its hash alone: who could make an equal one was given the page (vLLM)."""
    first, second = list(range(16)), list(range(100, 116))
    with broken_hashes():
        pool, kv = BlockPool(8), NotedKV(16)

        def compute_noted(tokens: list[int]) -> list[int]:
            with pool.open(tokens) as seq:
                step = pool.reserve(seq, seq.num_uncached_tokens)
                kv.execute(pool.prepare(step), [kv.causes(tokens)])
                pool.commit(step)
                return seq.block_ids.tolist()

        page = compute_noted(first)
        [digest] = hash_blocks(first)
        assert hash_blocks(second) == [digest] == [pool.digest_of(page[0])]
        assert pool.lookup([digest]).tolist() == page  # it is alone so far
        assert pool.match(second).num_tokens == 0
        assert pool.match(first).block_ids.tolist() == page
        assert pool.stats().num_collisions == 0
        other_page = compute_noted(second)
        assert pool.match(first).block_ids.tolist() == page
        assert pool.match(second).block_ids.tolist() == other_page != page
        assert pool.lookup([digest]).tolist() == []  # a digest that is not proof finds neither
        assert pool.stats().num_collisions == 1
        compute_noted([*first, *second])
        pool.check_integrity()
    assert hash_blocks(first) != hash_blocks(second)


@given(
    history=st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=9), st.sampled_from([None, "a", "b"])),
        max_size=12,
    )
)
def test_whatever_collides_a_pool_finds_what_it_finds_with_sound_digests(
    history: list[tuple[list[int], str | None]],
) -> None:
    sound = BlockPool(5, block_size=2)
    with broken_hashes():
        broken, kv = BlockPool(5, block_size=2), NotedKV(2)
    for tokens, salt in history:
        for pool in (sound, broken):
            pool.touch([0, 1, 0, 1])
            with pool.open(tokens, cache_salt=salt) as seq:
                step = pool.reserve(seq, seq.num_uncached_tokens)
                tables = pool.prepare(step)
                if pool is broken:
                    kv.execute(tables, [kv.causes(tokens, salt)])
                pool.commit(step)
            broken.lookup([bytes(32)] * 3)
        for other in ([0] * 4, [0, 1] * 2, tokens):
            for other_salt in (None, "a", "b"):
                found, expected = (pool.match(other, cache_salt=other_salt) for pool in (broken, sound))
                assert found.num_tokens == expected.num_tokens
                assert found.block_ids.tolist() == expected.block_ids.tolist()
        broken.check_integrity()
    assert sound.stats().num_collisions == 0


def test_sound_digests_are_looked_up_without_their_tokens() -> None:
    pool = BlockPool(8)
    remember(pool, ZERO_TO_47)
    assert pool.lookup(hash_blocks(ZERO_TO_47)).tolist() == pool.match(ZERO_TO_47).block_ids.tolist()
    assert (
        pool.lookup(hash_blocks([*ZERO_TO_31, *[9] * 16])).tolist()
        == pool.match(ZERO_TO_31).block_ids.tolist()
    )
    assert pool.lookup(hash_blocks(ZERO_TO_47, cache_salt="s")).tolist() == []
    assert pool.lookup([bytes(32)]).tolist() == []
    pool.evict(1)
    assert len(pool.lookup(hash_blocks(ZERO_TO_47))) == 2
    pool.bump_generation()
    assert pool.lookup(hash_blocks(ZERO_TO_47)).tolist() == []
    assert pool.stats().num_collisions == 0
