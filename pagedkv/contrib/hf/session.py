"""PagedSession: what generate takes as its cache."""

from __future__ import annotations

import time
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pagedkv.contrib.hf.base import NO_MAXIMUM, CacheWithLayers
from pagedkv.contrib.hf.dense import DenseView
from pagedkv.contrib.hf.eagerly import uncompiled
from pagedkv.contrib.hf.forward import Forward, current_forward
from pagedkv.contrib.hf.rows import Rows
from pagedkv.errors import CapacityError, StateError, UsageError
from pagedkv.sequence import Step

if TYPE_CHECKING:
    from pagedkv.contrib.hf.cache import PagedCache

running_session: ContextVar[PagedSession | None] = ContextVar("pagedkv_session", default=None)
"""Whose pass is running in this thread."""


class PagedSession(CacheWithLayers):
    """One call of generate, or one conversation: a batch of token rows whose K and V lie in a pool's pages.

    Made by :meth:`PagedCache.session`. To transformers it is a cache that has `get_seq_length` columns
    already: those that are cached in every row. The rest goes through the model, is written into pages, and
    is published for later sessions block by block. Rows hold no padding.

    A session may be given to `generate` again with more tokens behind those that it has, as any cache; for
    another prompt make another session, which costs nothing. Its pages can't be evicted until `close`, or
    until it is garbage-collected. A context manager that closes.

    Attributes
    ----------
    num_cached_tokens : list of int
        Tokens of each row of the prompt that were found when the session was made.
    first_pass_s : float
        Seconds of the first forward pass, which reads the prompt or its first chunk; 0 before.
    """

    def __init__(self, owner: PagedCache, rows: Rows, has_extras: bool, identity: object) -> None:
        super().__init__(owner.layers, len(owner.windows))
        self.has_extras = has_extras
        self._owner = owner
        self._rows = rows
        self._num_prompt_columns = rows.is_token.shape[1]
        self.num_cached_tokens = [seq.num_cached_tokens for seq in rows.sequences]
        # Of one row without padding, what the last such session has gathered may do.
        is_alone = len(rows) == 1 and bool(rows.is_token.all())
        self._identity = identity if is_alone and self._is_usual(self._num_prompt_columns) else None
        self._view = DenseView(owner.store)
        if self._identity is not None:
            self._view = owner.take_view(self._identity, rows.sequences[0].token_ids)
        self._is_fresh = True
        self.first_pass_s = 0.0
        self._began_s = 0.0
        self._module: torch.nn.Module | None = None
        self._forward: Forward | None = None
        self._held: Step | None = None
        self._is_closed = False

    # ------------------------------------------------------------------ one forward pass

    def begin(
        self,
        module: torch.nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
    ) -> int | None:
        """Reserve what the new columns need. The hooks on the model call this, `end` and `abandon`.

        Parameters
        ----------
        module : Module
            Whose pass it is.
        input_ids : Tensor [batch, length]
            Of the new columns.
        attention_mask : Tensor [batch, past + length], optional
            0 for padding.
        position_ids : Tensor [1 or batch, length], optional

        Returns
        -------
        int or None
            None when the pass has begun. Else it has not: the pool is full and reuse was lost, so that the
            columns from `get_seq_length` up to this one have to be computed first.

        Raises
        ------
        UsageError
            For tokens, a mask or positions that don't continue the session.
        OutOfBlocksError
        """
        if self._is_closed:
            raise StateError("session: expected an open one, got one that was closed")
        self._settle()
        ids = input_ids.detach().to("cpu", torch.int64).numpy()
        batch, length = ids.shape
        if length == 0:
            raise UsageError(
                "input_ids: expected at least one new token, got none; make a session for each prompt"
            )
        self._expand(batch)
        rows, owner = self._rows, self._owner
        is_token = rows.mask_with(attention_mask, length)
        ends = rows.extend(ids, is_token, position_ids)
        in_place = owner.reads_in_place()
        past = rows.past
        try:
            step = rows.reserve(ends)
        except CapacityError:
            rows.take_back()
            raise
        if self._is_fresh:
            times = batch // len(self.num_cached_tokens)
            self.num_cached_tokens = [seq.num_cached_tokens for seq in rows.sequences[::times]]
        if rows.past < past:
            self._view.forget(rows.past)
            return past
        tables = None
        if step is not None:
            if step.copies:
                owner.store.copy(step.copies)
            tables = owner.pool.prepare(step, share_prefixes=in_place)
        # Padding behind a token is asked for an answer too, by its place; pages have no such place.
        in_place = in_place and bool((np.diff(is_token.view(np.int8), axis=1) >= 0).all())
        self._forward = Forward(
            owner.store, self._view, list(rows.sequences), is_token, rows.past, step, tables, in_place
        )
        self._running = current_forward.set(self._forward), running_session.set(self)
        self._module = module
        self._began_s = time.perf_counter()
        return None

    def known(self, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the prompt's ids from `get_seq_length` up to a column, and the mask [batch, end]."""
        ids, mask = self._rows.known(end)
        return torch.from_numpy(ids), torch.from_numpy(mask.astype(np.int64))

    def end(self) -> None:
        """End a pass: publish what it computed."""
        forward = self._leave()
        if self._is_fresh:
            self.first_pass_s = time.perf_counter() - self._began_s
            read = len(forward.rows) * forward.length
            self._owner.token_s = min(self._owner.token_s, self.first_pass_s / read)
        self._rows.advance(forward.is_token)
        self._is_fresh = False
        if forward.step is None:
            return
        self._held = forward.step
        # Several tokens behind the prompt may be guesses, of which `crop` will cut some off.
        if forward.length == 1 or self._rows.past <= self._num_prompt_columns:
            self._settle()

    def abandon(self) -> None:
        """Give back what a pass that failed has reserved."""
        forward = self._leave()
        if forward.step is not None:
            self._owner.pool.abandon(forward.step)
        self._rows.take_back()
        self._view.forget(self._rows.past)

    def _leave(self) -> Forward:
        forward, self._forward = self._forward, None
        assert forward is not None
        if running_session.get() is self:  # and not in another thread, which closes what was left running
            current_forward.reset(self._running[0])
            running_session.reset(self._running[1])
        return forward

    def _settle(self, num_dropped: list[int] | None = None) -> None:
        """Commit the step that waits for `crop`, without the last `num_dropped` tokens of each row."""
        step, self._held = self._held, None
        if step is not None:
            self._rows.commit(step, num_dropped)

    def _expand(self, batch: int) -> None:
        """Repeat the rows as generate does for several beams or samples of each."""
        times, rest = divmod(batch, len(self._rows))
        if rest or (times > 1 and not self._is_fresh):
            raise UsageError(f"input_ids: expected {len(self._rows)} rows, as the session has, got {batch}")
        if times > 1:
            self.batch_repeat_interleave(times)

    def _is_usual(self, num_columns: int) -> bool:
        """Whether K of a text so long depends on its tokens and positions alone."""
        limit = self._owner.position_limit
        return limit is None or num_columns <= limit

    # ------------------------------------------------------------------ what transformers calls

    @uncompiled
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a layer's new K and V into pages, and return all of them, or these where pages are read."""
        if self._forward is None and self._owner.is_closed:
            raise StateError("session: expected one of an open cache, got one whose cache was closed")
        if self._forward is None:
            raise StateError(
                "update: expected a call of the model that the cache was made for, got one of something else"
            )
        if not torch.is_grad_enabled():
            return self._forward.update(layer_idx, key_states, value_states)
        with torch.no_grad():
            return self._forward.update(layer_idx, key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns that need no computation; during a pass the new ones too, of a layer that has them."""
        forward, past = self._forward, self._rows.past
        return past + (forward.length if forward is not None and layer_idx in forward.updated else 0)

    def get_mask_sizes(self, query_length: Any, layer_idx: int) -> tuple[int, int]:
        """Columns of K that a layer's attention is handed, and the place of the first."""
        if isinstance(query_length, torch.Tensor):  # older releases pass the new columns' places
            query_length = len(query_length)
        past = self._rows.past
        window = self._owner.windows[layer_idx] if layer_idx < len(self._owner.windows) else None
        if window is None:
            return past + query_length, 0
        return min(past, window - 1) + query_length, max(past - window + 1, 0)

    def get_max_length(self, layer_idx: int | None = None) -> int | None:
        """No maximum but the pool's pages."""
        return NO_MAXIMUM

    def get_max_cache_shape(self, layer_idx: int = 0) -> int | None:
        """No maximum but the pool's pages."""
        return NO_MAXIMUM

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last columns: ``-n`` drops n. Older releases give the number of columns to keep."""
        past = self._rows.past
        count = -tokens_to_remove if tokens_to_remove <= 0 else max(past - tokens_to_remove, 0)
        if count > past:
            raise UsageError(f"crop: expected at most {past} columns, got {count}")
        if count == 0:
            self._settle()
            return
        keep = past - count
        pairs = zip(self._rows.num_tokens_before(past), self._rows.num_tokens_before(keep), strict=True)
        self._settle([before - after for before, after in pairs])
        self._rows.truncate(keep)
        self._num_prompt_columns = min(self._num_prompt_columns, keep)
        self._view.forget(keep)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Continue row ``beam_idx[i]`` as row i; rows that nobody continues are closed."""
        self._settle()
        self._rows.select(beam_idx.detach().to("cpu").tolist())
        self._view.select(beam_idx.detach())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows."""
        if indices.dtype == torch.bool:
            indices = indices.nonzero().flatten()
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        self.reorder_cache(torch.arange(len(self._rows)).repeat_interleave(repeats))

    def reset(self) -> None:
        """Forget the session's tokens; what is published stays."""
        self._settle()
        self._rows.truncate(0)
        self._num_prompt_columns = 0
        self._view.forget()

    # ------------------------------------------------------------------ for the hooks on the model

    @property
    def is_running(self) -> bool:
        """Whether a forward pass has begun and not ended."""
        return self._forward is not None

    def runs_in(self, module: torch.nn.Module) -> bool:
        """Whether a forward pass has begun with this module."""
        return self._forward is not None and self._module is module

    def check_prompt(self, input_ids: torch.Tensor) -> None:
        """Compare a prompt with the computed columns, which no pass is going to be given.

        Parameters
        ----------
        input_ids : Tensor [batch, num_tokens]
            From the first column on. Of another batch size it says nothing.

        Raises
        ------
        UsageError
            For other tokens.
        """
        if input_ids.shape[0] == len(self._rows):
            self._rows.check_computed(input_ids.detach().to("cpu", torch.int64).numpy())

    def rewind(self, length: int) -> None:
        """Let a first pass begin at the first column although it is cached.

        Some releases do that with the first chunk of a prompt, and have no way to leave it out.
        """
        if self._is_fresh and length < self._num_prompt_columns:
            self._rows.past = 0

    def num_surplus_columns(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
    ) -> int:
        """Say how many of the first columns that a pass is given are here already.

        `generate` leaves these out, but not where it has an assistant's guesses at once.
        """
        length, past = input_ids.shape[1], self._rows.past
        if attention_mask is not None and attention_mask.ndim == 2:
            columns_in_all = attention_mask.shape[1]
            if columns_in_all in (length, past + length):
                return past if columns_in_all == length > past else 0
        if self._is_fresh and length >= self._num_prompt_columns:
            return past
        columns = np.flatnonzero(self._rows.is_token[0, :past])
        if len(self._rows) > 1 or not len(columns) or past >= length or position_ids is None:
            return 0
        known = self._rows.sequences[0].token_ids[: len(columns)]
        first = int(columns[0])  # whose position counts padding, or doesn't
        begins_anew = int(position_ids.reshape(-1)[first]) in (0, first)
        return past if begins_anew and input_ids[0, columns].tolist() == known.tolist() else 0

    @property
    def owner(self) -> PagedCache:
        """The cache that made it."""
        return self._owner

    # ------------------------------------------------------------------ for the caller

    @property
    def num_computed_tokens(self) -> list[int]:
        """Tokens of each row whose K and V are in pages."""
        return [seq.num_computed_tokens for seq in self._rows.sequences]

    def close(self) -> None:
        """Publish what is computed and give the pages back; later sessions find them."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._forward is not None:
            self.abandon()
        self._settle()
        rows, past = self._rows, self._rows.past
        is_alone = self._identity is not None and len(rows) == 1 and self._is_usual(past)
        if is_alone and not self._view.is_empty:
            self._owner.keep_view(self._identity, rows.sequences[0].token_ids[:past], self._view)
        self._view = DenseView(self._owner.store)
        rows.close()

    def __enter__(self) -> PagedSession:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_is_closed", True):
            self.close()

    def __repr__(self) -> str:
        closed = ", closed" * self._is_closed
        return f"<PagedSession: {self._rows.past} columns of {len(self._rows)} rows{closed}>"
