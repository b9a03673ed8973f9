"""PagedKVCache: what an engine holds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from pagedkv import ops
from pagedkv.batch import AttentionMetadata, BatchShape, FixedTables
from pagedkv.checks import check_bool, check_int, show
from pagedkv.config import Backend
from pagedkv.errors import StateError, UsageError
from pagedkv.extras import AnyExtra
from pagedkv.pages import Arrangement, KVPages
from pagedkv.pool import BlockPool, Match
from pagedkv.retention import Breakpoint, Retention
from pagedkv.sequence import Sequence, Step
from pagedkv.spec import KVCacheSpec
from pagedkv.stats import CacheStats


class PagedKVCache:
    """A pool, its pages, and the attention that reads them.

    A request is opened once; then, step by step, it reserves, prepares, writes and attends in every layer,
    commits, and has its sampled token appended; in the end it is closed::

        seq = cache.open(prompt, cache_salt=tenant)
        while not done:
            step = cache.reserve([seq], [seq.num_uncached_tokens])
            meta = cache.prepare(step)
            for layer in range(num_layers):
                ...                                  # q, k, v of meta.token_ids at meta.positions
                cache.write(layer, k, v, meta)
                attended = cache.attend(layer, q, meta)
            cache.commit(step)
            cache.append([seq], [sample(logits)])
        cache.close(seq)

    Parameters
    ----------
    spec : KVCacheSpec
    num_blocks : int, or iterable of int
        Pages, of every group or of each; ``spec.blocks_in("2GiB")`` and ``spec.split("2GiB", num_tokens)``
        turn memory into pages.
    device : torch.device or str
    namespace, prefix_caching, token_granular, events, policy, equal_cost_tokens
        As for :class:`BlockPool`.
    arrangement : "block" or "layer"
        As for :class:`KVPages`.
    share_prefixes : bool
        Whether attention reads pages that several sequences of a step share once for all of them. No answer
        depends on it.
    backend : str, optional
        Of the tensor operations; by default PAGEDKV_BACKEND, or the best for the device.

    Attributes
    ----------
    spec : KVCacheSpec
    pool : BlockPool
        Also for the verbs that need no tensor and are not repeated here: `touch`, `retain`, `match_lengths`,
        `fork`, `fence`, `no_cache`, `evict`, `bump_generation`, `take_events`, `explain` and so on.
    pages : KVPages
    """

    def __init__(
        self,
        spec: KVCacheSpec,
        num_blocks: int | Iterable[int],
        *,
        device: torch.device | str = "cpu",
        namespace: bytes = b"",
        prefix_caching: bool = True,
        token_granular: bool = True,
        events: bool = False,
        policy: str = "lru",
        equal_cost_tokens: int | None = None,
        arrangement: Arrangement = "block",
        share_prefixes: bool = True,
        backend: Backend | None = None,
    ) -> None:
        if not isinstance(spec, KVCacheSpec):
            raise UsageError(f"spec: expected a KVCacheSpec, got {show(spec)}")
        self.spec = spec
        self.share_prefixes = check_bool("share_prefixes", share_prefixes)
        # Before the pool, which touches its memory: a size that this machine can't hold fails here, at once.
        counts = spec.check_blocks(num_blocks)
        self.pages = KVPages(spec, counts, device=device, arrangement=arrangement)
        self.device = self.pages.device
        self._group_of = {layer: g for g, group in enumerate(spec.groups) for layer in group.layers}
        # Once, so that a missing one is known before the first step.
        self.backend = ops.resolve_backend(backend, self.device)
        self.pool = BlockPool(
            counts,
            windows=spec.windows,
            block_size=spec.block_size,
            namespace=namespace,
            prefix_caching=prefix_caching,
            token_granular=token_granular,
            events=events,
            policy=policy,
            equal_cost_tokens=equal_cost_tokens,
        )
        self._fixed: dict[BatchShape, FixedTables] = {}

    # The verbs of a request are the pool's; see BlockPool for what they raise and modify.

    def match(
        self,
        token_ids: Any,
        *,
        cache_salt: str | bytes | None = None,
        salt_from: int | None = None,
        extras: Iterable[AnyExtra] | None = (),
    ) -> Match:
        """Say how much of a prompt is cached; see :meth:`BlockPool.match`."""
        return self.pool.match(token_ids, cache_salt=cache_salt, salt_from=salt_from, extras=extras)

    def open(
        self,
        token_ids: Any,
        *,
        cache_salt: str | bytes | None = None,
        salt_from: int | None = None,
        extras: Iterable[AnyExtra] | None = (),
        retention: Iterable[Retention] | None = (),
        breakpoints: Iterable[Breakpoint] | None = (),
        no_cache: Iterable[tuple[int, int]] | None = (),
        reuse: bool = True,
    ) -> Sequence:
        """Begin a request and reference what is cached of it; see :meth:`BlockPool.open`."""
        return self.pool.open(
            token_ids,
            cache_salt=cache_salt,
            salt_from=salt_from,
            extras=extras,
            retention=retention,
            breakpoints=breakpoints,
            no_cache=no_cache,
            reuse=reuse,
        )

    def append(self, seqs: Sequence | list[Sequence], token_ids: Any) -> None:
        """Add tokens; see :meth:`BlockPool.append`."""
        self.pool.append(seqs, token_ids)

    def truncate(self, seq: Sequence, num_tokens: int) -> None:
        """Keep the first tokens; see :meth:`BlockPool.truncate`."""
        self.pool.truncate(seq, num_tokens)

    def preempt(self, seq: Sequence) -> None:
        """Give up the pages, keep the tokens; see :meth:`BlockPool.preempt`."""
        self.pool.preempt(seq)

    def close(self, seqs: Sequence | list[Sequence]) -> None:
        """End one request or several; see :meth:`BlockPool.close`."""
        self.pool.close(seqs)

    def reserve(self, seqs: Sequence | list[Sequence], num_new_tokens: int | Iterable[int]) -> Step:
        """Take the pages of the next tokens; see :meth:`BlockPool.reserve`."""
        return self.pool.reserve(seqs, num_new_tokens)

    def prepare(self, step: Step, *, shape: BatchShape | None = None) -> AttentionMetadata:
        """Run the step's copies and give its tables as tensors on the device.

        Modifies the pages that are copied to, the first time: later they may hold what was written since.
        Valid until the step ends.

        Parameters
        ----------
        step : Step
        shape : BatchShape, optional
            Pads the tables to this shape, always at the same address, as a captured graph needs them. One
            step of a shape may be open at a time.

        Raises
        ------
        StateError
            When the step has ended, or the last step of its shape has not.
        UsageError
            When the step is larger than the shape.
        """
        fixed = None if shape is None else self._fixed_tables(shape)
        if fixed is not None and isinstance(step, Step):
            fixed.check(step)
        # Before the step counts as prepared: should a copy fail, the next attempt runs it again.
        if isinstance(step, Step) and step.state == "reserved" and step.pool is self.pool and step.copies:
            for g, pages in enumerate(self.pages.groups):
                ids = torch.tensor(step.copies_of(g), dtype=torch.int64, device=self.device)
                for blocks in pages.extents:
                    ops.copy_blocks(blocks, ids[:, 0], ids[:, 1], backend=self.backend)
        # A graph of fixed shape has no place for groups, so none are looked for.
        tables = self.pool.prepare(step, share_prefixes=self.share_prefixes and fixed is None)
        if fixed is None:
            return AttentionMetadata.from_tables(tables, step, self.device)
        return fixed.fill(tables, step)

    def _fixed_tables(self, shape: BatchShape) -> FixedTables:
        if not isinstance(shape, BatchShape):
            raise UsageError(f"prepare: expected a BatchShape, got {show(shape)}")
        for name, size in zip(BatchShape._fields, shape, strict=True):
            check_int(f"prepare: shape.{name}", size, 1, 2**31 - 1)
        if shape not in self._fixed:
            self._fixed[shape] = FixedTables(shape, self.device, len(self.spec.groups))
        return self._fixed[shape]

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor, meta: AttentionMetadata) -> None:
        """Write the step's K and V of one layer into its pages.

        Parameters
        ----------
        layer : int
        key, value : Tensor [num_tokens, num_kv_heads, head_dim]
            In the order of ``meta.token_ids``; of the cache's dtype, or in a cache of 8 bits of any that
            `ops.write_kv` quantises.
        meta : AttentionMetadata

        Raises
        ------
        ShapeError, UsageError
        """
        key_pages, value_pages = self.pages[layer]
        key_scales, value_scales = self.pages.scales(layer)
        ops.write_kv(
            key,
            value,
            key_pages,
            value_pages,
            self._checked("write", meta).group(self._group_of[layer]).slot_mapping,
            key_scales=key_scales,
            value_scales=value_scales,
            backend=self.backend,
        )

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        meta: AttentionMetadata,
        *,
        scale: float | None = None,
        causal: bool = True,
        window: int | None = None,
        soft_cap: float | None = None,
        alibi_slopes: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        share_prefixes: bool = True,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend from the step's tokens to their sequences' pages; call `write` first.

        Parameters
        ----------
        layer : int
        query : Tensor [num_tokens, num_heads, head_dim]
        meta : AttentionMetadata
        scale, causal, soft_cap, alibi_slopes, sinks, mask, out, lse
            As for :func:`pagedkv.ops.paged_attention`.
        window : int, optional
            Likewise. By default that of the layer's group, whose pages reach no further back.
        share_prefixes : bool
            Whether pages that several sequences share are read once for all of them. The answer is the same.

        Returns
        -------
        Tensor [num_tokens, num_heads, head_dim]

        Raises
        ------
        ShapeError, UsageError
        """
        key_pages, value_pages = self.pages[layer]
        key_scales, value_scales = self.pages.scales(layer)
        g = self._group_of[layer]
        meta = self._checked("attend", meta).group(g)
        if (most := self.pool.windows[g]) is not None:
            window = most if window is None else check_int("attend: window", window, 1, most)
        return ops.paged_attention(
            query,
            key_pages,
            value_pages,
            meta.block_table,
            meta.seq_lens,
            meta.query_start_loc,
            scale=scale,
            causal=causal,
            window=window,
            soft_cap=soft_cap,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            mask=mask,
            key_scales=key_scales,
            value_scales=value_scales,
            shared_prefixes=meta.shared_prefixes if share_prefixes else None,
            out=out,
            lse=lse,
            backend=self.backend,
        )

    def commit(self, step: Step, num_accepted: int | Iterable[int] | None = None) -> None:
        """End a step and publish its full blocks; see :meth:`BlockPool.commit`.

        Raises
        ------
        StateError
            Also when the step was never prepared: its K/V can't have been written.
        """
        if isinstance(step, Step) and step.state == "reserved":
            raise StateError("commit: expected a prepared step, got one that is only reserved")
        self.pool.commit(step, num_accepted)

    def abandon(self, step: Step) -> None:
        """End a step as if it had not been reserved; see :meth:`BlockPool.abandon`."""
        self.pool.abandon(step)

    def reset(self) -> bool:
        """Forget everything cached; see :meth:`BlockPool.reset`."""
        return self.pool.reset()

    def stats(self) -> CacheStats:
        """Return a snapshot of the pool's counters."""
        return self.pool.stats()

    def check_integrity(self) -> None:
        """Check every invariant of the pool; see :meth:`BlockPool.check_integrity`."""
        self.pool.check_integrity()

    def _checked(self, verb: str, meta: Any) -> AttentionMetadata:
        """Check that `meta` is of an open step of this cache; pages of others may have a new owner."""
        if not isinstance(meta, AttentionMetadata):
            raise UsageError(f"{verb}: expected an AttentionMetadata, got {show(meta)}")
        if meta.step.pool is not self.pool:
            raise UsageError(f"{verb}: expected metadata of this cache, got those of another")
        if meta.step.state != "prepared":
            raise StateError(
                f"{verb}: expected metadata of an open step, got those of one that is {meta.step.state}"
            )
        return meta
