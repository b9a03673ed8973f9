"""The token rows of a session: which columns of the padded batch hold a token, and whose sequence has it."""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
import numpy.typing as npt
import torch

from pagedkv.errors import StateError, UsageError
from pagedkv.pool import BlockPool
from pagedkv.sequence import Sequence, Step

Mask = npt.NDArray[np.bool_]


class Rows:
    """A batch of rows over a pool's sequences. Sequences hold no padding; rows of equal tokens may share one.

    Parameters
    ----------
    pool : BlockPool
    sequences : list of Sequence
        One a row.
    is_token : ndarray [batch, num_columns] bool
        Which of the known columns hold a token, and not padding.
    position_limit : int, optional
        Longer rows are published to nobody.

    Attributes
    ----------
    sequences, is_token
        As they are now.
    past : int
        Columns that are computed; at first those that are cached in every row.
    """

    def __init__(
        self, pool: BlockPool, sequences: list[Sequence], is_token: Mask, position_limit: int | None
    ) -> None:
        self.sequences, self.is_token = sequences, is_token
        self.past = min(self._ends_of_cached())
        self._pool = pool
        self._position_limit = position_limit
        self._lengths: dict[Sequence, int] = {}

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def distinct(self) -> list[Sequence]:
        """Each sequence once."""
        return list(dict.fromkeys(self.sequences))

    # ------------------------------------------------------------------ a pass

    def mask_with(self, mask: torch.Tensor | None, length: int) -> Mask:
        """Return which of the computed and of `length` new columns hold a token.

        Parameters
        ----------
        mask : Tensor [batch, at least past + length], optional
            What the model was given.

        Raises
        ------
        UsageError
            When it is not the mask of the known columns.
        """
        batch, columns = len(self), self.past + length
        known = self.is_token[:, :columns]
        if mask is None:
            is_token = np.ones((batch, columns), dtype=bool)
        elif mask.ndim == 2 and mask.shape[0] == batch and mask.shape[1] >= columns:
            is_token = mask[:, :columns].detach().to("cpu").numpy() != 0
        else:
            raise UsageError(
                f"attention_mask: expected [{batch}, {columns}], of the session's {self.past} columns and "
                f"the new, got {list(mask.shape)}"
            )
        if (is_token[:, : known.shape[1]] != known).any():
            got = "none" if mask is None else "another"
            raise UsageError(
                "attention_mask: expected the mask that the session was made with, got "
                f"{got}; pass generate's mask to session(ids, attention_mask=…) too"
            )
        return is_token

    def extend(self, ids: npt.NDArray[np.int64], is_token: Mask, positions: torch.Tensor | None) -> list[int]:
        """Tell the sequences what the new columns hold; of the prompt they know it.

        Parameters
        ----------
        ids : ndarray [batch, length]
        is_token : ndarray [batch, past + length]
        positions : Tensor [1 or batch, length], optional

        Returns
        -------
        list of int
            Tokens that each row has in all.

        Raises
        ------
        UsageError
            For tokens or positions that don't continue the rows.
        """
        new = is_token[:, self.past :]
        begins: list[int] = is_token[:, : self.past].sum(1).tolist()
        tokens = [row[mask].tolist() for row, mask in zip(ids, new, strict=True)]
        usual = usual_positions(positions, new, begins)
        self._part(tokens)
        self._lengths = {seq: seq.num_tokens for seq in self.sequences}
        is_padded: list[bool] = np.logical_not(is_token.all(axis=1)).tolist()
        longer: dict[Sequence, list[int]] = {}
        seen = set()
        for i, (seq, own, begin) in enumerate(zip(self.sequences, tokens, begins, strict=True)):
            if seq in seen:
                continue
            seen.add(seq)
            known = seq.num_tokens - begin
            if known < 0:
                raise StateError(
                    f"session: expected at least {begin} tokens in row {i}, got {seq.num_tokens}"
                )
            if known > 0 and (seq.token_ids[begin : begin + len(own)] != own[:known]).any():
                raise UsageError(_other_tokens(i, begin))
            # Only what is generated behind padding stands elsewhere, and is of no use to others.
            if usual[i] < (min(known, len(own)) if is_padded[i] else len(own)):
                first = begin + usual[i]
                raise UsageError(
                    f"position_ids: expected {first} for the token at {first} of row {i}, got another; the "
                    "session has all before it; make a session for each prompt"
                )
            self._keep_private(seq, begin, len(own), usual[i])
            if len(own) > known:
                longer[seq] = own[known:]
        if longer:
            self._pool.append(list(longer), list(longer.values()))
        return [begin + len(own) for begin, own in zip(begins, tokens, strict=True)]

    def check_computed(self, ids: npt.NDArray[np.int64]) -> None:
        """Compare ids [batch, num_columns] with the tokens of the computed columns.

        Raises
        ------
        UsageError
            For other tokens.
        """
        for i, (row, mask, seq) in enumerate(zip(ids, self.is_token, self.sequences, strict=True)):
            mask = mask[: min(self.past, len(row))]
            tokens = row[: len(mask)][mask]
            differ = np.flatnonzero(seq.token_ids[: len(tokens)] != tokens)
            if len(differ):
                raise UsageError(_other_tokens(i, int(differ[0])))

    def reserve(self, ends: list[int]) -> Step | None:
        """Take pages for the rows up to these tokens; None when all are computed.

        In a full pool a row may lose the part of its reuse that ends inside a block. Where that lies in
        front of the new columns, `past` is less afterwards, and nothing is taken.
        """
        counts = {seq: end - seq.num_computed_tokens for seq, end in zip(self.sequences, ends, strict=True)}
        counts = {seq: count for seq, count in counts.items() if count > 0}
        if not counts:
            return None
        step = self._pool.reserve(list(counts), list(counts.values()))
        if step.num_new_tokens == list(counts.values()):
            return step
        end_of_reuse = min(self._ends_of_cached())
        if end_of_reuse >= self.past:
            return step
        self._pool.abandon(step)
        self.take_back()
        self.past = end_of_reuse
        return None

    def known(self, end: int) -> tuple[npt.NDArray[np.int64], Mask]:
        """Return the ids ``[batch, end − past]`` of the columns from `past` on, and which hold a token."""
        mask = self.is_token[:, :end]
        ids = np.zeros(mask.shape, dtype=np.int64)
        for row, own, seq in zip(ids, mask, self.sequences, strict=True):
            row[own] = seq.token_ids[: own.sum()]
        return ids[:, self.past :], mask

    def advance(self, is_token: Mask) -> None:
        """Note that all these columns are computed."""
        self.past = is_token.shape[1]
        if self.past > self.is_token.shape[1]:
            self.is_token = is_token

    def take_back(self) -> None:
        """Forget the tokens of a pass that failed, so that another may be tried."""
        for seq, num_tokens in self._lengths.items():
            if seq.num_tokens > num_tokens:
                seq.truncate(num_tokens)

    def commit(self, step: Step, num_dropped: Many[int] | None = None) -> None:
        """Publish what a step computed, without the last `num_dropped` tokens of each row."""
        accepted = None
        if num_dropped is not None:
            by_row = dict(zip(self.sequences, num_dropped, strict=True))
            pairs = zip(step.sequences, step.num_new_tokens, strict=True)
            accepted = [max(count - by_row.get(seq, 0), 0) for seq, count in pairs]
        self._pool.commit(step, accepted)

    # ------------------------------------------------------------------ other rows, fewer columns

    def num_tokens_before(self, column: int) -> list[int]:
        """Tokens that each row has in front of a column."""
        counts: list[int] = self.is_token[:, :column].sum(1).tolist()
        return counts

    def truncate(self, past: int) -> None:
        """Keep the first `past` columns."""
        for seq, num_tokens in zip(self.sequences, self.num_tokens_before(past), strict=True):
            if seq.num_tokens > num_tokens:
                seq.truncate(num_tokens)
        self.past = past
        self.is_token = self.is_token[:, :past]

    def select(self, order: list[int]) -> None:
        """Continue row ``order[i]`` as row i; sequences that nobody continues are closed."""
        sequences = [self.sequences[i] for i in order]
        kept = set(sequences)
        for seq in self.distinct:
            if seq not in kept:
                seq.close()
        self.sequences, self.is_token = sequences, self.is_token[order]

    def close(self) -> None:
        """Give the pages back."""
        self._pool.close(self.distinct)

    def _ends_of_cached(self) -> list[int]:
        pairs = zip(self.is_token, self.sequences, strict=True)
        return [column_of(row, seq.num_cached_tokens) for row, seq in pairs]

    def _part(self, tokens: list[list[int]]) -> None:
        """Give rows that shared a sequence their own where they go different ways."""
        if len(set(self.sequences)) == len(self):
            return
        first: dict[Sequence, list[int]] = {}
        parts: dict[tuple[Sequence, tuple[int, ...]], Sequence] = {}
        for i, (seq, own) in enumerate(zip(self.sequences, tokens, strict=True)):
            key = seq, tuple(own)
            if key not in parts:
                parts[key] = seq if first.setdefault(seq, own) == own else seq.fork()
            self.sequences[i] = parts[key]

    def _keep_private(self, seq: Sequence, begin: int, count: int, num_usual: int) -> None:
        """Publish nothing from the first token on whose K others would have otherwise."""
        limit = self._position_limit
        first = begin if limit is not None and begin + count > limit else begin + num_usual
        if first < begin + count and seq.num_committed_tokens <= first:
            seq.no_cache(first)


def column_of(is_token: Mask, num_tokens: int) -> int:
    """Return how many columns hold a row's first tokens, and the padding in front of the next."""
    columns = np.flatnonzero(is_token)
    return int(columns[num_tokens]) if num_tokens < len(columns) else len(is_token)


def usual_positions(position_ids: torch.Tensor | None, new: Mask, begins: list[int]) -> list[int]:
    """Return for each row how many of its new tokens stand where they would without padding.

    The K of a token that stands elsewhere is of no use to others.

    Parameters
    ----------
    position_ids : Tensor [1 or batch, at least length] or [several, 1 or batch, at least length], optional
    new : ndarray [batch, length] bool
        Which of the new columns hold a token.
    begins : list of int
        Tokens in front of the new ones.
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
        is_usual = (own == np.arange(begins[i], begins[i] + count)).all(0)
        usual.append(count if is_usual.all() else int(np.argmin(is_usual)))
    return usual


def _other_tokens(row: int, position: int) -> str:
    return (
        f"input_ids: expected the tokens that the session was made with, got others in row {row} from "
        f"position {position} on; make a session for each prompt"
    )
