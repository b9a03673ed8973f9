"""Tile shapes by GPU, head size and dtype, and how much work is done apart; both from sizes alone.

Nothing here looks into a tensor: grids and work space are the same at every replay of a CUDA graph.
"""

from __future__ import annotations

from typing import NamedTuple

STATE_BYTES = 256 * 2**20
"""Most memory that the states of splits may take; beyond it fewer splits are computed apart."""
PROGRAMS_PER_MULTIPROCESSOR = 8
"""Programs that keep a multiprocessor busy and even out sequences of different lengths."""
BYTES_BY_ARITHMETIC = 1
"""In the table: pages of 8 bits on a GPU that can't convert float8_e4m3fn itself."""
MAX_GROUP_PACK = 8
"""Queries of one sequence that stand side by side in a tile of a prefix group."""


class Tile(NamedTuple):
    """A tile of `block_m` queries times `block_n` keys, and how a GPU runs it."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


class _Row(NamedTuple):
    family: str
    element_bytes: int  # of the dot products' operands, or BYTES_BY_ARITHMETIC
    max_head_dim: int
    tile: Tile


# The first row that fits. One tile serves decode and prefill, so that a query's answer is the same in both.
# 64 queries are the least that wgmma and tcgen05 take; where float32 would not fit into registers with them,
# smaller tiles run on mma.sync. No tile of sm80 needs more shared memory than sm86, sm89 and sm120 have.
TABLE = (
    _Row("interpret", 4, 256, Tile(32, 64, 4, 1)),
    _Row("sm80", BYTES_BY_ARITHMETIC, 256, Tile(64, 32, 4, 2)),
    _Row("sm80", 2, 128, Tile(64, 64, 4, 2)),
    _Row("sm80", 2, 256, Tile(64, 32, 8, 2)),
    _Row("sm80", 4, 128, Tile(32, 32, 4, 2)),
    _Row("sm80", 4, 256, Tile(16, 16, 4, 2)),
    _Row("sm90", 2, 128, Tile(64, 64, 4, 3)),
    _Row("sm90", 2, 256, Tile(64, 64, 8, 2)),
    _Row("sm90", 4, 64, Tile(64, 32, 4, 2)),
    _Row("sm90", 4, 128, Tile(32, 32, 4, 2)),
    _Row("sm90", 4, 256, Tile(16, 16, 4, 2)),
    _Row("sm100", 2, 128, Tile(64, 64, 4, 3)),
    _Row("sm100", 2, 256, Tile(64, 64, 8, 2)),
    _Row("sm100", 4, 64, Tile(64, 32, 4, 2)),
    _Row("sm100", 4, 128, Tile(32, 32, 4, 2)),
    _Row("sm100", 4, 256, Tile(16, 16, 4, 2)),
    _Row("gfx", BYTES_BY_ARITHMETIC, 256, Tile(64, 32, 4, 1)),
    _Row("gfx", 2, 128, Tile(64, 64, 4, 1)),
    _Row("gfx", 2, 256, Tile(64, 32, 4, 1)),
    _Row("gfx", 4, 64, Tile(32, 32, 4, 1)),
    _Row("gfx", 4, 256, Tile(32, 16, 4, 1)),
)


def family_of(target: str) -> str:
    """Return the table's name for a target such as ``sm89`` or ``gfx942``."""
    if target.startswith("gfx"):
        return "gfx"
    if not target.startswith("sm"):
        return target
    version = int(target.removeprefix("sm"))
    # Consumer Blackwell (sm120) has neither wgmma nor tcgen05, and the shared memory of Ampere.
    return "sm100" if 100 <= version < 120 else "sm90" if version == 90 else "sm80"


def has_e4m3(target: str) -> bool:
    """Tell whether the target converts from float8_e4m3fn itself."""
    if target.startswith("sm"):
        return int(target.removeprefix("sm")) >= 89
    return not target.startswith("gfx") or target >= "gfx950"


def choose_tile(target: str, element_bytes: int, head_dim: int) -> Tile:
    """Return the tile of the table."""
    family = family_of(target)
    return next(
        row.tile for row in TABLE if row[:2] == (family, element_bytes) and head_dim <= row.max_head_dim
    )


class Heads(NamedTuple):
    """How the query heads of one KV head are laid into tiles, beside each other for every token."""

    in_tile: int
    num_tiles: int  # of one KV head
    tokens: int  # of one tile

    @classmethod
    def of(cls, group: int, block_m: int) -> Heads:
        """Lay `group` heads into tiles of `block_m` rows."""
        in_tile = min(group, block_m)
        return cls(in_tile, -(-group // in_tile), block_m // in_tile)


class StatePlan(NamedTuple):
    """Which states of splits are computed ahead of the fold."""

    num_splits: int = 0  # of a sequence, from its first on; 0: none
    max_tokens: int = 1  # of a sequence; one with more queries computes its splits itself
    of_all: bool = False  # of every sequence, or else of prefix groups only
    group_tiles: int = 0
    group_pack: int = 1
    num_parts: int = 1  # that the splits of one tile are dealt to


def plan_states(
    *,
    num_tokens: int,
    num_seqs: int,
    num_heads: int,
    head_dim: int,
    max_len: int,
    split_tokens: int,
    head_tiles: int,
    tile_tokens: int,
    num_multiprocessors: int,
    num_groups: int,
    num_prefix_rows: int,
) -> StatePlan:
    """Plan the states for a batch of these sizes.

    Splits of a sequence run side by side where the sequences alone do not fill the GPU; `head_tiles` tiles of
    heads make the grid's other dimension.
    """
    mean_tokens = -(-num_tokens // num_seqs)
    num_splits = max_len // -split_tokens * -1
    wanted = PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors
    # A lone prefill has tiles enough, and none that another sequence could share.
    splits_all = num_splits > 1 and num_seqs * head_tiles < wanted
    splits_all = splits_all and not (num_seqs == 1 and num_tokens > tile_tokens)
    if not splits_all and not num_groups:
        return StatePlan()

    # Decode and verification need as many tokens as they have on average; beside a prefill one is likely.
    needed = mean_tokens if mean_tokens <= tile_tokens else 1
    max_tokens = tile_tokens
    bytes_per_token = num_seqs * num_heads * (head_dim + 2) * 4
    while max_tokens > needed and max_tokens * num_splits * bytes_per_token > STATE_BYTES:
        max_tokens = max(needed, max_tokens // 2)
    num_splits = min(num_splits, STATE_BYTES // (max_tokens * bytes_per_token))
    if num_splits == 0:
        return StatePlan()

    group_pack, group_tiles = 1, 0
    if num_groups:
        group_pack = mean_tokens if mean_tokens <= min(MAX_GROUP_PACK, max_tokens) else 1
        group_tiles = num_prefix_rows // (tile_tokens // group_pack) + num_groups
    num_items = group_tiles + (num_seqs if splits_all else 0)
    num_parts = min(num_splits, max(1, wanted // (num_items * head_tiles)))
    return StatePlan(num_splits, max_tokens, splits_all, group_tiles, group_pack, num_parts)
