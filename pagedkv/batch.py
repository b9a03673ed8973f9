"""What attention reads of one step, as tensors. The lowest module that imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch

from pagedkv.sequence import Step, StepTables


@dataclass(frozen=True, eq=False)
class AttentionMetadata:
    """One step's tables on the device.

    Row i is the i-th sequence of the step. Field names are vLLM's; `csr` gives FlashInfer's.

    Attributes
    ----------
    block_table : Tensor [num_seqs, max_blocks] int32
        Pages in token order, padded with −1.
    slot_mapping : Tensor [num_tokens] int64
        Where each token's K/V goes: ``block_id · block_size + offset``. −1: nowhere, it is there already.
    seq_lens : Tensor [num_seqs] int32
        Tokens that the sequence's last query sees, itself included.
    query_start_loc : Tensor [num_seqs + 1] int32
        Row i's tokens are ``[query_start_loc[i], query_start_loc[i + 1])``.
    positions, token_ids : Tensor [num_tokens] int64
        Of the tokens to compute.
    num_seqs, num_tokens, max_query_len, max_seq_len, block_size : int
    step : Step
        Kept alive by its metadata: its pages are given back when it ends.
    """

    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    positions: torch.Tensor
    token_ids: torch.Tensor
    num_seqs: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    block_size: int
    step: Step

    @classmethod
    def from_tables(cls, tables: StepTables, step: Step, device: torch.device) -> AttentionMetadata:
        """Move the arrays of :meth:`BlockPool.prepare` to `device`.

        On the CPU the memory is shared, but for the block table: the pool believes what it wrote there.
        """

        def tensor(array: npt.NDArray[Any]) -> torch.Tensor:
            return torch.from_numpy(array).to(device, non_blocking=True)

        return cls(
            block_table=torch.tensor(tables.block_table, device=device),
            slot_mapping=tensor(tables.slot_mapping),
            seq_lens=tensor(tables.seq_lens),
            query_start_loc=tensor(tables.query_start_loc),
            positions=tensor(tables.positions),
            token_ids=tensor(tables.token_ids),
            num_seqs=len(tables.seq_lens),
            num_tokens=len(tables.positions),
            max_query_len=int((tables.query_start_loc[1:] - tables.query_start_loc[:-1]).max()),
            max_seq_len=int(tables.seq_lens.max()),
            block_size=step.pool.block_size,
            step=step,
        )

    @property
    def last_token_index(self) -> torch.Tensor:
        """Row of each sequence's last token among the step's tokens, [num_seqs] int64."""
        return self.query_start_loc[1:].long() - 1

    def csr(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the page table as FlashInfer takes it.

        Returns
        -------
        kv_indptr : Tensor [num_seqs + 1] int32
        kv_indices : Tensor [num_pages] int32
        kv_last_page_len : Tensor [num_seqs] int32
            From 1 to `block_size`; 0 for a row of length 0.
        """
        num_pages = (self.seq_lens + self.block_size - 1) // self.block_size
        kv_indptr = torch.zeros(self.num_seqs + 1, dtype=torch.int32, device=self.seq_lens.device)
        torch.cumsum(num_pages, 0, dtype=torch.int32, out=kv_indptr[1:])
        columns = torch.arange(self.block_table.shape[1], device=self.seq_lens.device)
        kv_indices = self.block_table[columns < num_pages[:, None]]
        return kv_indptr, kv_indices, self.seq_lens - (num_pages - 1).clamp(min=0) * self.block_size
