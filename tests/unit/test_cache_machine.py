"""PagedKVCache under any sequence of verbs: every logit is held to an oracle that has no cache."""

from __future__ import annotations

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from toy_cache import MODEL, OTHER, PROMPT, make_cache
from toy_model import MAX_TOKENS

import pagedkv
from pagedkv import (
    OutOfBlocksError,
)


class CacheMachine(RuleBasedStateMachine):
    """Requests come, go, shrink and are preempted in a pool too small for them; every logit is checked."""

    NUM_BLOCKS = 7

    def __init__(self) -> None:
        super().__init__()
        self.cache = make_cache(self.NUM_BLOCKS)
        self.seqs: list[pagedkv.Sequence] = []

    @precondition(lambda self: len(self.seqs) < 4)
    @rule(
        starts=st.lists(st.sampled_from([(PROMPT, 16), (OTHER, 16), (PROMPT, 5), (OTHER, 11)]), max_size=3),
        tail=st.lists(st.integers(0, 2), min_size=1, max_size=4),
        salt=st.sampled_from([None, None, "a"]),
    )
    def open(self, starts: list[tuple[list[int], int]], tail: list[int], salt: str | None) -> None:
        tokens = [token for source, length in starts for token in source[:length]]
        self.seqs.append(self.cache.open(tokens + tail, cache_salt=salt))

    @precondition(lambda self: self.seqs)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        ready = [seq for seq in self.seqs if seq.num_uncached_tokens]
        if not ready:
            return
        seqs = data.draw(st.lists(st.sampled_from(ready), min_size=1, unique_by=id))
        counts = [data.draw(st.integers(1, seq.num_uncached_tokens)) for seq in seqs]
        try:
            step = self.cache.reserve(seqs, counts)
        except OutOfBlocksError:
            return
        meta = self.cache.prepare(step)
        end = data.draw(st.sampled_from(["commit", "commit", "accept", "abandon unwritten", "abandon"]))
        if end == "abandon unwritten":
            return self.cache.abandon(step)
        MODEL.check(MODEL.forward(self.cache, meta), meta, seqs)
        if end == "abandon":
            return self.cache.abandon(step)
        accepted = None
        if end == "accept":
            accepted = [data.draw(st.integers(0, n)) for n in step.num_new_tokens]
        self.cache.commit(step, accepted)

    @precondition(lambda self: self.seqs)
    @rule(data=st.data(), verb=st.sampled_from(["append", "append", "truncate", "preempt", "close"]))
    def change(self, data: st.DataObject, verb: str) -> None:
        seq = data.draw(st.sampled_from(self.seqs))
        if verb == "append":
            if seq.num_tokens < MAX_TOKENS // 2:
                self.cache.append(seq, data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=9)))
        elif verb == "truncate":
            self.cache.truncate(seq, data.draw(st.integers(0, seq.num_tokens)))
        elif verb == "preempt":
            self.cache.preempt(seq)
        else:
            self.seqs.remove(seq)
            self.cache.close(seq)

    @rule(num_blocks=st.integers(1, 3))
    def spoil(self, num_blocks: int) -> None:
        """Somebody else uses pages for a while, and leaves garbage in them."""
        try:
            block_ids = self.cache.pool.allocate(num_blocks)
        except OutOfBlocksError:
            return
        self.cache.pages.blocks[torch.from_numpy(block_ids).long()] = float("nan")
        self.cache.pool.free(block_ids)

    @invariant()
    def holds_together(self) -> None:
        self.cache.check_integrity()

    def teardown(self) -> None:
        for seq in self.seqs:
            self.cache.close(seq)
        assert self.cache.reset()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=60, stateful_step_count=30)
