"""One model computed by several processes; to an engine it looks like any model.

Only rank 0 has an engine: it schedules, owns the pool and chooses the tokens. The others have pages and
weights of their heads, and follow. So there is nothing on which processes could disagree: every step's tables
come from the one pool, and every token from logits that one process has seen. Deadlines, random seeds and the
order of arrival are rank 0's alone, and need not be the same anywhere else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from pagedkv import ops
from pagedkv.batch import AttentionMetadata
from pagedkv.cache import PagedKVCache
from pagedkv.config import Backend
from pagedkv.pages import KVPages
from pagedkv.runner.config import ModelConfig
from pagedkv.runner.model import AnyModel, Model, Part
from pagedkv.runner.ranks import Ranks
from pagedkv.runner.shard import Shard
from pagedkv.spec import KVCacheSpec

Tables = dict[str, Any]
"""The fields of one group's `AttentionMetadata`, with arrays in place of tensors."""


class RankPart(Part):
    """What a shard's layers do with those of the other ranks."""

    def __init__(self, shard: Shard, ranks: Ranks) -> None:
        self.vocab = slice(shard.vocab.start, shard.vocab.stop)
        self._ranks = ranks
        self._vocab_size = shard.config.vocab_size

    def sum(self, x: Tensor) -> Tensor:
        """Add the ranks' parts of a product."""
        return self._ranks.sum(x)

    def join(self, logits: Tensor) -> Tensor:
        """Put the ranks' logits side by side, on rank 0; on the others nobody looks at them."""
        return self._ranks.gather(logits, self._vocab_size)


class LeadingModel:
    """Rank 0's part of a model, which has the others compute theirs at the same time.

    Parameters
    ----------
    model : Model
        Of rank 0's shard.
    ranks : Ranks
    """

    def __init__(self, model: Model, ranks: Ranks) -> None:
        self._model = model
        self._ranks = ranks
        self._numbers: WeakKeyDictionary[PagedKVCache, int] = WeakKeyDictionary()
        self._num_caches = 0

    @property
    def config(self) -> ModelConfig:
        """That of rank 0's part: its KV is what the engine's pages hold."""
        return self._model.config

    @property
    def namespace(self) -> bytes:
        """Of rank 0's part."""
        return self._model.namespace

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of K and V."""
        return self._model.dtype

    @property
    def device(self) -> torch.device:
        """Where rank 0 computes."""
        return self._model.device

    def forward(self, cache: PagedKVCache, meta: AttentionMetadata) -> Tensor:
        """Compute one step on all ranks; see `Model.forward`.

        Raises
        ------
        RankError
            One of them has failed; no further step can be computed.
        """
        number = self._numbers.get(cache)
        if number is None:
            number = self._numbers[cache] = self._num_caches
            self._num_caches += 1
            self._ranks.send(("pages", number, cache.spec, cache.pool.num_blocks_by_group, cache.backend))
        groups = range(len(cache.spec.groups))
        tables = [_to_arrays(meta.group(g)) for g in groups]
        copies = [meta.step.copies_of(g) for g in groups]
        kept = sorted(self._numbers.values())
        self._ranks.send(("step", number, kept, copies, tables))
        with self._ranks.together():
            return self._model.forward(cache, meta)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits [n, vocab] of `hidden` [n, hidden], each rank's part computed by it."""
        hidden = hidden.float().contiguous()
        self._ranks.send(("logits", len(hidden)))
        with self._ranks.together():
            self._ranks.broadcast(hidden)
            return self._model.logits(hidden)


def follow(model: AnyModel, ranks: Ranks) -> None:
    """Do what rank 0 asks for, until it ends.

    Parameters
    ----------
    model : Model
        What `load_model` gave on this rank.
    ranks : Ranks

    Raises
    ------
    RankError
        Another rank has failed.
    """
    assert isinstance(model, Model), "it is another on rank 0 only"
    pages: dict[int, RankPages] = {}
    while (command := ranks.receive()) is not None:
        with ranks.together(), torch.inference_mode():
            match command:
                case ("pages", number, spec, num_blocks, backend):
                    pages[number] = RankPages(model, spec, num_blocks, backend)
                case ("step", number, kept, copies, tables):
                    pages = {each: pages[each] for each in kept}
                    model.forward(pages[number], pages[number].prepare(copies, tables))
                case ("logits", num_rows):
                    hidden = torch.empty(num_rows, model.config.hidden_size, device=model.device)
                    ranks.broadcast(hidden)
                    model.logits(hidden)
                case _:
                    raise AssertionError(f"no such command: {command}")


class RankPages:
    """The pages of one rank's heads, without a pool: which ones a step uses is decided elsewhere.

    Parameters
    ----------
    model : Model
        Of this rank's shard.
    spec : KVCacheSpec
        Of rank 0's pages, which may have another number of heads.
    num_blocks : tuple of int
        Of each group.
    backend : str
    """

    def __init__(
        self, model: Model, spec: KVCacheSpec, num_blocks: tuple[int, ...], backend: Backend
    ) -> None:
        heads = model.config.num_kv_heads
        groups = tuple(dataclasses.replace(group, num_kv_heads=heads) for group in spec.groups)
        self._pages = KVPages(dataclasses.replace(spec, groups=groups), num_blocks, device=model.device)
        self._group_of = {layer: g for g, group in enumerate(groups) for layer in group.layers}
        self._backend = backend

    def prepare(self, copies: list[list[tuple[int, int, int]]], tables: list[Tables]) -> AttentionMetadata:
        """Run a step's copies and put its tables on the device; both are one for each group."""
        for pages, pairs in zip(self._pages.groups, copies, strict=True):
            if pairs:
                ids = torch.tensor(pairs, dtype=torch.int64, device=self._pages.device)
                for blocks in pages.extents:
                    ops.copy_blocks(blocks, ids[:, 0], ids[:, 1], backend=self._backend)
        first, *others = (_to_metadata(each, self._pages.device) for each in tables)
        return dataclasses.replace(first, other_groups=tuple(others))

    def write(self, layer: int, key: Tensor, value: Tensor, meta: AttentionMetadata) -> None:
        """As `PagedKVCache.write`."""
        key_scales, value_scales = self._pages.scales(layer)
        ops.write_kv(
            key,
            value,
            *self._pages[layer],
            meta.group(self._group_of[layer]).slot_mapping,
            key_scales=key_scales,
            value_scales=value_scales,
            backend=self._backend,
        )

    def attend(self, layer: int, query: Tensor, meta: AttentionMetadata, **options: Any) -> Tensor:
        """As `PagedKVCache.attend`."""
        key_scales, value_scales = self._pages.scales(layer)
        meta = meta.group(self._group_of[layer])
        return ops.paged_attention(
            query,
            *self._pages[layer],
            meta.block_table,
            meta.seq_lens,
            meta.query_start_loc,
            key_scales=key_scales,
            value_scales=value_scales,
            shared_prefixes=meta.shared_prefixes,
            backend=self._backend,
            **options,
        )


def _to_arrays(meta: AttentionMetadata) -> Tables:
    """Return the tables of one group as what can be sent."""
    return {
        field.name: _map(getattr(meta, field.name), Tensor, lambda tensor: tensor.cpu().numpy())
        for field in dataclasses.fields(meta)
        if field.name not in ("step", "other_groups")
    }


def _to_metadata(tables: Tables, device: torch.device) -> AttentionMetadata:
    """Return what `_to_arrays` was given, on `device` and without its step: that is where the pool is."""
    fields = {
        name: _map(value, np.ndarray, lambda array: torch.from_numpy(array).to(device))
        for name, value in tables.items()
    }
    return AttentionMetadata(**fields, step=None)  # type: ignore[arg-type]


def _map(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Change a value of a kind, or those in a named tuple."""
    if isinstance(value, kind):
        return change(value)
    return type(value)(*(_map(each, kind, change) for each in value)) if isinstance(value, tuple) else value
