"""Whatever is wrong with a call to the pool: the right error, a message that helps, and nothing changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pool_driving import compute, remember
from pool_refusals import GRAMMAR, SALTS, SIZES, TOKENS, Case, World, assert_refused

from pagedkv import BlockPool, Embeddings, Media, OutOfBlocksError, PagedKVError, StateError, UsageError

EXTRAS: list[tuple[str, Any]] = [
    ("not a list", 7),
    ("no extra", ["picture"]),
    ("a picture beyond the prompt", [Media(2, 2, b"d" * 32)]),
    ("a position beyond the prompt", [Embeddings([3], b"d" * 32)]),
]

CASES: list[Case] = [
    ("open: an empty prompt", UsageError, lambda w: w.pool.open([])),
    ("open: an empty array", UsageError, lambda w: w.pool.open(np.array([], np.int64))),
    *[(f"open: {name}", UsageError, lambda w, t=tokens: w.pool.open(t)) for name, tokens in TOKENS],
    *[(f"match: {name}", UsageError, lambda w, t=tokens: w.pool.match(t)) for name, tokens in TOKENS],
    *[
        (f"append: {name}", UsageError, lambda w, t=tokens: w.pool.append(w.seq, t))
        for name, tokens in TOKENS
    ],
    *[
        (
            f"append to the second of two: {name}",
            UsageError,
            lambda w, t=tokens: w.pool.append([w.seq, w.other], [[1], t]),
        )
        for name, tokens in TOKENS
    ],
    *[
        (f"open: a salt that is {name}", UsageError, lambda w, s=salt: w.pool.open([1, 2, 3], cache_salt=s))
        for name, salt in SALTS
    ],
    *[
        (f"match: a salt that is {name}", UsageError, lambda w, s=salt: w.pool.match([1, 2, 3], cache_salt=s))
        for name, salt in SALTS
    ],
    *[
        (f"open: extras: {name}", UsageError, lambda w, x=extras: w.pool.open([1, 2, 3], extras=x))
        for name, extras in EXTRAS
    ],
    # reserve
    ("reserve: 0 tokens", UsageError, lambda w: w.pool.reserve(w.seq, 0)),
    ("reserve: -1 tokens", UsageError, lambda w: w.pool.reserve(w.seq, -1)),
    ("reserve: more tokens than there are", UsageError, lambda w: w.pool.reserve(w.seq, 2)),
    ("reserve: too many for the second", UsageError, lambda w: w.pool.reserve([w.seq, w.other], [1, 6])),
    *[
        (f"reserve: {name} tokens", UsageError, lambda w, n=n: w.pool.reserve(w.other, n))
        for name, n in SIZES
    ],
    ("reserve: fewer counts", UsageError, lambda w: w.pool.reserve([w.seq, w.other], [1])),
    ("reserve: more counts", UsageError, lambda w: w.pool.reserve([w.seq], [1, 1])),
    ("reserve: one sequence twice", UsageError, lambda w: w.pool.reserve([w.other, w.other], [1, 1])),
    ("reserve: a closed sequence", StateError, lambda w: w.pool.reserve(w.closed, 1)),
    (
        "reserve: a closed sequence in second place",
        StateError,
        lambda w: w.pool.reserve([w.seq, w.closed], [1, 1]),
    ),
    ("reserve: a sequence in a step", StateError, lambda w: w.pool.reserve([w.seq, w.busy], [1, 1])),
    ("reserve: of another pool", UsageError, lambda w: w.pool.reserve([w.seq, w.foreign_seq], [1, 1])),
    ("reserve: no sequence", UsageError, lambda w: w.pool.reserve([w.seq, 7], [1, 1])),
    ("reserve: None", UsageError, lambda w: w.pool.reserve(None, [1])),
    ("reserve: an array without dimensions", UsageError, lambda w: w.pool.reserve(np.array(1), [1])),
    ("reserve: sequences in no order", UsageError, lambda w: w.pool.reserve({w.seq, w.other}, [1, 1])),
    ("reserve: counts in no order", UsageError, lambda w: w.pool.reserve([w.seq, w.other], {1, 2})),
    ("reserve: counts as bytes", UsageError, lambda w: w.pool.reserve([w.seq, w.other], b"\1\1")),
    ("reserve: counts as a mapping", UsageError, lambda w: w.pool.reserve([w.seq], {1: 1})),
    # the end of a step
    ("prepare: a finished step", StateError, lambda w: w.pool.prepare(w.committed)),
    ("commit: a finished step", StateError, lambda w: w.pool.commit(w.committed)),
    ("abandon: a finished step", StateError, lambda w: w.pool.abandon(w.committed)),
    ("prepare: a step of another pool", UsageError, lambda w: w.pool.prepare(w.foreign_step)),
    ("commit: a step of another pool", UsageError, lambda w: w.pool.commit(w.foreign_step)),
    ("abandon: a step of another pool", UsageError, lambda w: w.pool.abandon(w.foreign_step)),
    ("prepare: no step", UsageError, lambda w: w.pool.prepare(w.seq)),
    ("commit: -1 accepted", UsageError, lambda w: w.pool.commit(w.step, -1)),
    ("commit: more accepted than computed", UsageError, lambda w: w.pool.commit(w.step, [7])),
    ("commit: fewer counts", UsageError, lambda w: w.pool.commit(w.step, [])),
    ("commit: more counts", UsageError, lambda w: w.pool.commit(w.step, [1, 1])),
    *[
        (f"commit: {name} accepted", UsageError, lambda w, n=n: w.pool.commit(w.step, [n]))
        for name, n in SIZES
    ],
    # one sequence
    ("append: a closed sequence", StateError, lambda w: w.pool.append(w.closed, 1)),
    (
        "append: a closed sequence in second place",
        StateError,
        lambda w: w.pool.append([w.seq, w.closed], [1, 1]),
    ),
    ("append: a sequence in a step", StateError, lambda w: w.pool.append([w.seq, w.busy], [1, 1])),
    ("append: of another pool", UsageError, lambda w: w.pool.append([w.seq, w.foreign_seq], [1, 1])),
    ("append: sequences in no order", UsageError, lambda w: w.pool.append({w.seq, w.other}, [1, 1])),
    ("append: tokens in no order", UsageError, lambda w: w.pool.append([w.seq, w.other], {1, 2})),
    ("append: fewer tokens than sequences", UsageError, lambda w: w.pool.append([w.seq, w.other], [1])),
    ("truncate: -1", UsageError, lambda w: w.seq.truncate(-1)),
    ("truncate: longer than it is", UsageError, lambda w: w.seq.truncate(11)),
    *[(f"truncate: {name}", UsageError, lambda w, n=n: w.seq.truncate(n)) for name, n in SIZES],
    ("truncate: a closed sequence", StateError, lambda w: w.closed.truncate(0)),
    ("truncate: a sequence in a step", StateError, lambda w: w.busy.truncate(0)),
    ("truncate: of another pool", UsageError, lambda w: w.pool.truncate(w.foreign_seq, 0)),
    ("preempt: a closed sequence", StateError, lambda w: w.closed.preempt()),
    ("preempt: a sequence in a step", StateError, lambda w: w.busy.preempt()),
    ("preempt: of another pool", UsageError, lambda w: w.pool.preempt(w.foreign_seq)),
    ("close: a closed sequence", StateError, lambda w: w.closed.close()),
    ("close: of another pool", UsageError, lambda w: w.pool.close(w.foreign_seq)),
    # pages
    ("allocate: more than there are", OutOfBlocksError, lambda w: w.pool.allocate(17)),
    ("allocate: -1", UsageError, lambda w: w.pool.allocate(-1)),
    *[(f"allocate: {name}", UsageError, lambda w, n=n: w.pool.allocate(n)) for name, n in SIZES],
    ("evict: -1", UsageError, lambda w: w.pool.evict(-1)),
    *[(f"evict: {name}", UsageError, lambda w, n=n: w.pool.evict(n)) for name, n in SIZES],
    ("free: a page nobody holds", StateError, lambda w: w.pool.free([_empty_page(w)])),
    ("free: a page twice", StateError, lambda w: w.pool.free([*w.raw, *w.raw])),
    ("free: a page of a sequence", StateError, lambda w: w.pool.free([*w.raw, int(w.seq.block_ids[0])])),
    ("free: a cached page", StateError, lambda w: w.pool.free(w.pool.match([7] * 4).block_ids)),
    ("free: -1", UsageError, lambda w: w.pool.free([*w.raw, -1])),
    ("free: beyond the pool", UsageError, lambda w: w.pool.free([*w.raw, 16])),
    ("free: one id, not in a list", UsageError, lambda w: w.pool.free(w.raw[0])),
    ("free: one id as an array", UsageError, lambda w: w.pool.free(np.array(w.raw[0]))),
    ("free: ids as bytes", UsageError, lambda w: w.pool.free(bytes(w.raw))),
    ("free: ids as text", UsageError, lambda w: w.pool.free("")),
    *[(f"free: {name}", UsageError, lambda w, n=n: w.pool.free([*w.raw, n])) for name, n in SIZES],
    ("digest_of: -1", UsageError, lambda w: w.pool.digest_of(-1)),
    ("digest_of: beyond the pool", UsageError, lambda w: w.pool.digest_of(16)),
    *[(f"digest_of: {name}", UsageError, lambda w, n=n: w.pool.digest_of(n)) for name, n in SIZES],
]


def _empty_page(world: World) -> int:
    held = {i for seq in (world.seq, world.other, world.busy) for i in seq.block_ids.tolist()} | set(
        world.raw
    )
    return next(i for i in range(16) if i not in held and world.pool.digest_of(i) is None)


@pytest.mark.parametrize(("name", "error", "call"), CASES, ids=[name for name, _, _ in CASES])
def test_a_refused_call_says_why_and_changes_nothing(
    name: str, error: type[PagedKVError], call: Callable[[World], Any]
) -> None:
    assert_refused(error, call)


def test_the_message_names_the_token_by_its_index() -> None:
    with pytest.raises(UsageError, match=r"index 3"):
        BlockPool(4).open([1, 2, 3, -4, 5])
    with pytest.raises(UsageError, match=r"index 1"):
        BlockPool(4).open(np.array([1, 2**32]))


@pytest.mark.parametrize("num_blocks", [0, -1, 2**31, 4.0, "4", None, True])
def test_an_impossible_number_of_blocks_is_refused(num_blocks: Any) -> None:
    with pytest.raises(UsageError, match=f"num_blocks: {GRAMMAR}"):
        BlockPool(num_blocks)


@pytest.mark.parametrize("option", ["prefix_caching", "token_granular", "events"])
@pytest.mark.parametrize("value", ["no", "", 0, 1, None, [], 1.0, np.array([True, False])])
def test_a_switch_is_on_or_off_and_nothing_else(option: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"{option}: expected True or False, got"):
        BlockPool(4, **{option: value})
    for switch in (True, False, np.True_, np.False_):
        assert getattr(BlockPool(4, **{option: switch}), option) is bool(switch)


@pytest.mark.parametrize("namespace", ["text", None, 7])
def test_a_namespace_that_is_not_bytes_is_refused(namespace: Any) -> None:
    with pytest.raises(UsageError, match=f"namespace: {GRAMMAR}"):
        BlockPool(4, namespace=namespace)


def test_no_room_says_how_much_is_needed_and_how_much_there_is() -> None:
    pool = BlockPool(4, block_size=4)
    remember(pool, [1] * 4)
    pool.allocate(1)
    with pytest.raises(OutOfBlocksError, match=GRAMMAR) as refusal:
        pool.allocate(4)
    assert (refusal.value.needed, refusal.value.free, refusal.value.evictable) == (4, 2, 1)
    with pytest.raises(OutOfBlocksError, match=GRAMMAR) as refusal:
        pool.reserve(pool.open(range(100, 116)), 16)
    assert (refusal.value.needed, refusal.value.free, refusal.value.evictable) == (4, 2, 1)


def test_leaving_a_with_block_after_close_is_fine() -> None:
    pool = BlockPool(4)
    with compute(pool, range(20)) as seq:
        seq.close()
    assert seq.is_closed
    with pytest.raises(StateError, match=GRAMMAR):
        seq.close()


def test_a_closed_sequence_can_still_be_looked_at() -> None:
    pool = BlockPool(4)
    seq = compute(pool, range(20))
    seq.close()
    assert seq.is_closed
    assert seq.token_ids.tolist() == list(range(20))
    assert seq.block_ids.tolist() == []
