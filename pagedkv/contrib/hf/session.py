"""PagedSession: what generate takes as its cache."""

from __future__ import annotations

import time
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import cache_utils
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from pagedkv.contrib.hf.dense import DenseView
from pagedkv.contrib.hf.eagerly import uncompiled
from pagedkv.contrib.hf.forward import Forward, current_forward
from pagedkv.errors import CapacityError, StateError, UsageError
from pagedkv.sequence import Sequence, Step

if TYPE_CHECKING:
    from pagedkv.contrib.hf.cache import PagedCache

NO_MAXIMUM = -1


class PagedSession(Cache):  # type: ignore[misc]
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

    def __init__(
        self,
        owner: PagedCache,
        rows: list[Sequence],
        is_token: npt.NDArray[np.bool_],
        has_extras: bool,
        identity: object,
    ) -> None:
        super().__init__(layers=owner.make_layers())
        self.has_extras = has_extras
        self._owner = owner
        # Of one row without padding, what the last such session has gathered may do.
        limit = owner.position_limit
        is_usual = limit is None or is_token.shape[1] <= limit
        self._identity = identity if len(rows) == 1 and is_token.all() and is_usual else None
        self._view = (
            DenseView(owner.store) if self._identity is None else owner.take_view(identity, rows[0].token_ids)
        )
        self._rows = rows
        self._is_token = is_token  # [batch, known columns]
        self._num_prompt_columns = is_token.shape[1]
        self.num_cached_tokens = [seq.num_cached_tokens for seq in rows]
        # A row's cached tokens end at this column; behind the first such end the model runs.
        ends = [column_of(row, seq.num_cached_tokens) for row, seq in zip(is_token, rows, strict=True)]
        self._past = min(ends)
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
    ) -> None:
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
            raise UsageError("input_ids: expected at least one new token, got none, in a forward pass")
        self._expand(batch)
        is_token = self._mask_of(attention_mask, batch, self._past + length)
        new = is_token[:, self._past :]
        skipped = is_token[:, : self._past].sum(1).tolist()
        tokens = [row[mask].tolist() for row, mask in zip(ids, new, strict=True)]
        usual = self._usual_positions(position_ids, new, skipped)
        self._part(tokens)
        self._lengths = {seq: seq.num_tokens for seq in self._rows}
        is_padded: list[bool] = np.logical_not(is_token.all(axis=1)).tolist()
        self._append(tokens, skipped, usual, is_padded)
        in_place = self._owner.reads_in_place()
        try:
            step = self._reserve([s + len(t) for s, t in zip(skipped, tokens, strict=True)])
        except CapacityError:
            self._shorten()
            raise
        tables = None
        if step is not None:
            if step.copies:
                self._owner.store.copy(step.copies)
            tables = self._owner.pool.prepare(step, share_prefixes=in_place)
        # Padding behind a token is asked for an answer too, by its place; pages have no such place.
        in_place = in_place and bool((np.diff(is_token.astype(np.int8), axis=1) >= 0).all())
        self._forward = Forward(
            self._owner.store, self._view, list(self._rows), is_token, self._past, step, tables, in_place
        )
        self._running = current_forward.set(self._forward)
        self._module = module
        self._began_s = time.perf_counter()

    def end(self) -> None:
        """End a pass: publish what it computed."""
        forward = self._leave()
        if self._is_fresh:
            self.first_pass_s = time.perf_counter() - self._began_s
            read = len(forward.rows) * forward.length
            self._owner.token_s = min(self._owner.token_s, self.first_pass_s / read)
        self._past += forward.length
        if forward.is_token.shape[1] > self._is_token.shape[1]:
            self._is_token = forward.is_token
        self._is_fresh = False
        if forward.step is None:
            return
        self._held = forward.step
        # Several tokens behind the prompt may be guesses, of which `crop` will cut some off.
        if forward.length == 1 or self._past <= self._num_prompt_columns:
            self._settle()

    def abandon(self) -> None:
        """Give back what a pass that failed has reserved."""
        forward = self._leave()
        if forward.step is not None:
            self._owner.pool.abandon(forward.step)
        self._shorten()
        self._view.forget(self._past)

    def _leave(self) -> Forward:
        forward, self._forward = self._forward, None
        assert forward is not None
        current_forward.reset(self._running)
        return forward

    def _shorten(self) -> None:
        """Take back the tokens of a pass that failed, so that another may be tried."""
        for seq, num_tokens in self._lengths.items():
            if seq.num_tokens > num_tokens:
                seq.truncate(num_tokens)

    def _settle(self, num_dropped: Many[int] | None = None) -> None:
        """Commit the step that waits for `crop`, without the last `num_dropped` tokens of each row."""
        step, self._held = self._held, None
        if step is None:
            return
        accepted = None
        if num_dropped is not None:
            by_row = dict(zip(map(id, self._rows), num_dropped, strict=True))
            pairs = zip(step.sequences, step.num_new_tokens, strict=True)
            accepted = [max(count - by_row.get(id(seq), 0), 0) for seq, count in pairs]
        self._owner.pool.commit(step, accepted)

    def _expand(self, batch: int) -> None:
        """Repeat the rows as generate does for several beams or samples of each."""
        times, rest = divmod(batch, len(self._rows))
        if rest or (times > 1 and not self._is_fresh):
            raise UsageError(f"input_ids: expected {len(self._rows)} rows, as the session has, got {batch}")
        if times > 1:
            self.batch_repeat_interleave(times)

    def _mask_of(self, mask: torch.Tensor | None, batch: int, columns: int) -> npt.NDArray[np.bool_]:
        """Return which columns hold a token, the new ones included."""
        known = self._is_token[:, :columns]
        if mask is None:
            is_token = np.ones((batch, columns), dtype=bool)
        elif mask.ndim == 2 and mask.shape[0] == batch and mask.shape[1] >= columns:
            is_token = mask[:, :columns].detach().to("cpu").numpy() != 0
        else:
            raise UsageError(
                f"attention_mask: expected [{batch}, {columns}], of the session's {self._past} columns and "
                f"the new, got {list(mask.shape)}"
            )
        if (is_token[:, : known.shape[1]] != known).any():
            got = "none" if mask is None else "another"
            raise UsageError(
                "attention_mask: expected the mask that the session was made with, got "
                f"{got}; pass generate's mask to session(ids, attention_mask=…) too"
            )
        return is_token

    def _usual_positions(
        self, position_ids: torch.Tensor | None, new: npt.NDArray[np.bool_], skipped: list[int]
    ) -> list[int]:
        """Return for each row how many of the new tokens stand where they would without padding.

        The K of a token that stands elsewhere is of no use to others.
        """
        counts: list[int] = new.sum(1).tolist()
        if position_ids is None:
            return counts
        positions: npt.NDArray[np.int64] = position_ids.detach().to("cpu").numpy()
        positions = positions.reshape(-1, *positions.shape[-2:])  # some models have several for each token
        length = new.shape[1]
        usual = []
        for i, count in enumerate(counts):
            own = positions[:, i % positions.shape[1], -length:][:, new[i]]
            is_usual = (own == np.arange(skipped[i], skipped[i] + count)).all(0)
            usual.append(count if is_usual.all() else int(np.argmin(is_usual)))
        return usual

    def _part(self, tokens: list[list[int]]) -> None:
        """Give rows that shared a sequence their own where they go different ways."""
        if len({id(seq) for seq in self._rows}) == len(self._rows):
            return
        owner_of: dict[int, list[int]] = {}
        parts: dict[tuple[int, tuple[int, ...]], Sequence] = {}
        for i, (seq, own) in enumerate(zip(self._rows, tokens, strict=True)):
            key = id(seq), tuple(own)
            if key not in parts:
                parts[key] = seq if owner_of.setdefault(id(seq), own) == own else seq.fork()
            self._rows[i] = parts[key]

    def _append(
        self, tokens: list[list[int]], skipped: list[int], usual: list[int], is_padded: list[bool]
    ) -> None:
        """Tell the sequences what the new columns hold; of the prompt they know it."""
        seqs, added, seen = [], [], set()
        limit = self._owner.position_limit
        for i, (seq, own) in enumerate(zip(self._rows, tokens, strict=True)):
            if id(seq) in seen:
                continue
            seen.add(id(seq))
            begin, known = skipped[i], seq.num_tokens - skipped[i]
            if known > 0 and (seq.token_ids[begin : begin + len(own)] != own[:known]).any():
                raise UsageError(
                    f"input_ids: expected the tokens that the session was made with, got others in row {i} "
                    f"from position {begin} on; make a session for each prompt"
                )
            if known < 0:
                raise StateError(
                    f"session: expected at least {begin} tokens in row {i}, got {seq.num_tokens}"
                )
            first = begin + usual[i]
            # Only what is generated behind padding stands elsewhere, and is of no use to others.
            if usual[i] < (min(known, len(own)) if is_padded[i] else len(own)):
                raise UsageError(
                    f"position_ids: expected {first} for the token at {first} of row {i}, got another; the "
                    "session has all before it; make a session for each prompt"
                )
            if limit is not None and begin + len(own) > limit:
                first = min(first, begin)
            if first < begin + len(own) and seq.num_committed_tokens <= first:
                seq.no_cache(first)
            if len(own) > known:
                seqs.append(seq)
                added.append(own[known:])
        if seqs:
            self._owner.pool.append(seqs, added)

    def _reserve(self, ends: list[int]) -> Step | None:
        """Take pages for the sequences up to these tokens; None when all are computed."""
        counts = {seq: end - seq.num_computed_tokens for seq, end in zip(self._rows, ends, strict=True)}
        counts = {seq: count for seq, count in counts.items() if count > 0}
        if not counts:
            return None
        return self._owner.pool.reserve(list(counts), list(counts.values()))

    # ------------------------------------------------------------------ what transformers calls

    @uncompiled
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a layer's new K and V into pages, and return all of them, or these where pages are read."""
        if self._forward is None:
            raise StateError(
                "update: expected a call of the model that the cache was made for, got one of something else"
            )
        with torch.no_grad():
            return self._forward.update(layer_idx, key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns that need no computation; during a pass the new ones too, of a layer that has them."""
        forward = self._forward
        return self._past + (forward.length if forward is not None and layer_idx in forward.updated else 0)

    def get_mask_sizes(self, query_length: Any, layer_idx: int) -> tuple[int, int]:
        """Columns of K that a layer's attention is handed, and the place of the first."""
        if isinstance(query_length, torch.Tensor):  # older releases pass the new columns' places
            query_length = len(query_length)
        window = self._owner.windows[layer_idx] if layer_idx < len(self._owner.windows) else None
        if window is None:
            return self._past + query_length, 0
        return min(self._past, window - 1) + query_length, max(self._past - window + 1, 0)

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """No maximum but the pool's pages."""
        return NO_MAXIMUM

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """No maximum but the pool's pages."""
        return NO_MAXIMUM

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last columns: ``-n`` drops n. Older releases give the number of columns to keep."""
        count = -tokens_to_remove if tokens_to_remove <= 0 else max(self._past - tokens_to_remove, 0)
        if count == 0:
            self._settle()
            return
        if count > self._past:
            raise UsageError(f"crop: expected at most {self._past} columns, got {count}")
        keep = self._past - count
        before, after = (self._is_token[:, :past].sum(1).tolist() for past in (self._past, keep))
        self._settle([b - a for b, a in zip(before, after, strict=True)])
        for seq, num_tokens in zip(self._rows, after, strict=True):
            if seq.num_tokens > num_tokens:
                seq.truncate(num_tokens)
        self._past = keep
        self._is_token = self._is_token[:, :keep]
        self._num_prompt_columns = min(self._num_prompt_columns, keep)
        self._view.forget(keep)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Continue row ``beam_idx[i]`` as row i; rows that nobody continues are closed."""
        self._settle()
        order = beam_idx.detach().to("cpu").tolist()
        rows = [self._rows[i] for i in order]
        kept = {id(seq) for seq in rows}
        for seq in {id(seq): seq for seq in self._rows}.values():
            if id(seq) not in kept:
                seq.close()
        self._rows, self._is_token = rows, self._is_token[order]
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
        for seq in {id(seq): seq for seq in self._rows}.values():
            seq.truncate(0)
        self._is_token = self._is_token[:, :0]
        self._past = self._num_prompt_columns = 0
        self._view.forget()

    # ------------------------------------------------------------------ for the caller

    @property
    def is_running(self) -> bool:
        """Whether a forward pass has begun and not ended."""
        return self._forward is not None

    def runs_in(self, module: torch.nn.Module) -> bool:
        """Whether a forward pass has begun with this module."""
        return self._forward is not None and self._module is module

    def rewind(self, length: int) -> None:
        """Let a first pass begin at the first column although it is cached.

        Some releases do that with the first chunk of a prompt, and have no way to leave it out.
        """
        if self._is_fresh and length < self._num_prompt_columns:
            self._past = 0

    def num_surplus_columns(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None) -> int:
        """Say how many of the first columns that a pass is given are here already.

        `generate` leaves these out, but not where it has an assistant's guesses at once.
        """
        length = input_ids.shape[1]
        if self._is_fresh and length >= self._num_prompt_columns:
            return self._past
        if len(self._rows) > 1 or not 0 < self._past < length or position_ids is None:
            return 0
        known = self._rows[0].token_ids[: self._past]
        begins_anew = int(position_ids.reshape(-1)[0]) == 0
        return self._past if begins_anew and input_ids[0, : self._past].tolist() == known.tolist() else 0

    @property
    def owner(self) -> PagedCache:
        """The cache that made it."""
        return self._owner

    @property
    def num_computed_tokens(self) -> list[int]:
        """Tokens of each row whose K and V are in pages."""
        return [seq.num_computed_tokens for seq in self._rows]

    def close(self) -> None:
        """Publish what is computed and give the pages back; later sessions find them."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._forward is not None:
            self.abandon()
        self._settle()
        limit = self._owner.position_limit
        is_usual = limit is None or self._past <= limit
        if self._identity is not None and len(self._rows) == 1 and is_usual and not self._view.is_empty:
            tokens = self._rows[0].token_ids[: self._past]
            self._owner.keep_view(self._identity, tokens, self._view)
        self._view = DenseView(self._owner.store)
        self._owner.pool.close(list({id(seq): seq for seq in self._rows}.values()))

    def __enter__(self) -> PagedSession:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_is_closed", True):
            self.close()

    def __repr__(self) -> str:
        return f"<PagedSession: {self._past} columns of {len(self._rows)} rows{', closed' * self._is_closed}>"


class PagedLayer(DynamicLayer):  # type: ignore[misc]
    """Tells transformers what kind of layer it is; the session does the rest."""


class PagedSlidingLayer(DynamicSlidingWindowLayer):  # type: ignore[misc]
    """The same, for a layer with a sliding window."""


NoLayer = getattr(cache_utils, "DummyLayer", PagedLayer)
"""For a layer that keeps nothing; older releases have no word for it."""


def column_of(is_token: npt.NDArray[np.bool_], num_tokens: int) -> int:
    """Return how many columns hold a row's first tokens, and the padding in front of the next."""
    columns = np.flatnonzero(is_token)
    return int(columns[num_tokens]) if num_tokens < len(columns) else len(is_token)
