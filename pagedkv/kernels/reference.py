"""The meaning of every operation, in plain torch, on any device that torch has.

It also checks the values in slots and tables, and not only their shapes: a wrong table is refused here before
anything is written, where a fast kernel would read or write somewhere else.

Sums are taken by elementwise additions in one fixed tree, and never by a matrix product, whose bits differ
with the number of rows. So a query gets the same bits whatever the batch around it.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import NamedTuple

import torch

from pagedkv.errors import UsageError

SPLIT_TOKENS = 512
"""Keys are attended in splits at multiples of this many positions, and the splits are folded in order."""
LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
"""The largest number of each dtype that is quantised to."""

_CHUNK_ELEMENTS = 2**15
"""Sums that are taken at once: their terms fit into a processor's cache."""


# ------------------------------------------------------------------------------------------------ K and V


@torch.no_grad()
def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
) -> None:
    """Write each token's K and V to its slot; a slot of −1 is skipped."""
    block_size = key_pages.shape[1]
    num_slots = key_pages.shape[0] * block_size
    wrong = slot_mapping[(slot_mapping < -1) | (slot_mapping >= num_slots)]
    if wrong.numel():
        what = f"slots from -1 to {num_slots - 1}"
        raise UsageError(f"slot_mapping: expected {what}, got {int(wrong[0])}, in write_kv")
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    places = slots // block_size, slots % block_size
    _store(key[kept], key_pages, key_scales, places)
    _store(value[kept], value_pages, value_scales, places)


def _store(
    tokens: torch.Tensor,
    pages: torch.Tensor,
    scales: torch.Tensor | None,
    places: tuple[torch.Tensor, torch.Tensor],
) -> None:
    if tokens.dtype != pages.dtype:
        tokens = _quantised(tokens.float(), pages.dtype, scales, places)
    _bits(pages).index_put_(places, _bits(tokens))


def _quantised(
    tokens: torch.Tensor,
    dtype: torch.dtype,
    scales: torch.Tensor | None,
    places: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Divide by the scales, which are computed and stored where each token has its own."""
    largest = LARGEST[dtype]
    if scales is not None:
        if scales.stride(1) == 0:
            scale = scales[places]
        else:
            scale = tokens.abs().amax(-1) / largest
            scales.index_put_(places, scale)
        scale = scale[..., None]
        tokens = torch.where(scale == 0, 0, tokens / scale)
    tokens = tokens.clamp(-largest, largest)
    return (tokens if dtype.is_floating_point else tokens.round()).to(dtype)


# ------------------------------------------------------------------------------------------------- blocks


@torch.no_grad()
def copy_blocks(blocks: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor) -> None:
    """Copy whole blocks, all layers at once; every source is read before any destination is written."""
    _check_ids("sources", sources, len(blocks), "copy_blocks")
    _check_ids("destinations", destinations, len(blocks), "copy_blocks")
    blocks = _bits(blocks)
    blocks[destinations] = blocks[sources]


@torch.no_grad()
def gather_blocks(blocks: torch.Tensor, block_ids: torch.Tensor, buffer: torch.Tensor) -> None:
    """Copy blocks into a buffer, one after the other."""
    _check_ids("block_ids", block_ids, len(blocks), "gather_blocks")
    _bits(buffer).copy_(_bits(blocks)[block_ids])


@torch.no_grad()
def scatter_blocks(buffer: torch.Tensor, block_ids: torch.Tensor, blocks: torch.Tensor) -> None:
    """Copy a buffer into blocks."""
    _check_ids("block_ids", block_ids, len(blocks), "scatter_blocks")
    _bits(blocks)[block_ids] = _bits(buffer)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Numbers of 8 bits as integers: torch can't index all of their dtypes."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def _check_ids(name: str, ids: torch.Tensor, num_blocks: int, where: str) -> None:
    wrong = ids[(ids < 0) | (ids >= num_blocks)]
    if wrong.numel():
        what = f"block ids from 0 to {num_blocks - 1}"
        raise UsageError(f"{name}: expected {what}, got {int(wrong[0])}, in {where}")


# ----------------------------------------------------------------------------------------------- attention


class State(NamedTuple):
    """What queries got from some keys: out = values / total.

    Attributes
    ----------
    largest : Tensor […]
        Logit; −inf where no key was seen.
    total : Tensor […]
        Of exp(logit − largest).
    values : Tensor […, head_dim]
        Weighted by exp(logit − largest).
    """

    largest: torch.Tensor
    total: torch.Tensor
    values: torch.Tensor


class Options(NamedTuple):
    """How logits are made; see :func:`pagedkv.ops.paged_attention`."""

    scale: float
    causal: bool
    window: int
    soft_cap: float
    alibi_slopes: torch.Tensor | None  # [num_kv_heads, group, 1]


class Keys(NamedTuple):
    """The keys of a sequence at the positions [begin, begin + num_keys); zeros where no query sees one."""

    begin: int
    keys: torch.Tensor  # [num_keys, num_kv_heads, head_dim]
    values: torch.Tensor
    scales: torch.Tensor | None  # [num_keys, num_kv_heads]


@torch.no_grad()
def paged_attention(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    scale: float,
    causal: bool,
    window: int,
    soft_cap: float,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    mask: torch.Tensor | None,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
    prefix_groups: torch.Tensor | None = None,
    prefix_rows: torch.Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Attend sequence by sequence, split by split, in `dtype`. Shared pages are read for each sequence."""
    lens, starts = seq_lens.tolist(), query_start_loc.tolist()
    check_tables(block_table, lens, starts, window, mask, num_tokens=len(query), pages_shape=key_pages.shape)
    num_kv_heads, head_dim = key_pages.shape[2:]
    heads = num_kv_heads, query.shape[1] // num_kv_heads
    slopes = None if alibi_slopes is None else alibi_slopes.to(dtype).view(*heads, 1)
    options = Options(scale, causal, window, soft_cap, slopes)
    out.zero_()  # rows of padding stay so
    if lse is not None:
        lse.fill_(-inf)
    for row, seq_len in enumerate(lens):
        queries = slice(starts[row], starts[row + 1])
        num_new = queries.stop - queries.start
        if num_new == 0 or seq_len == 0:
            continue
        q = query[queries].to(dtype).view(num_new, *heads, head_dim)
        first_new = seq_len - num_new
        first = _first_seen(first_new, window)
        state = State(q.new_full(q.shape[:3], -inf), q.new_zeros(q.shape[:3]), torch.zeros_like(q))
        for begin in range(first - first % SPLIT_TOKENS, seq_len, SPLIT_TOKENS):
            seen = range(max(first, begin), min(begin + SPLIT_TOKENS, seq_len))
            split = _read(
                block_table[row], seen, begin, key_pages, value_pages, key_scales, value_scales, dtype
            )
            # In chunks, for their memory; a query in front of all of a causal split's keys has nothing in it.
            chunk = max(1, _CHUNK_ELEMENTS // (query.shape[1] * max(len(split.keys), head_dim)))
            for i in range(max(0, begin - first_new) if causal else 0, num_new, chunk):
                part = slice(i, min(i + chunk, num_new))
                masked = None if mask is None else mask[queries][part]
                attended = _attend(q[part], first_new + i, split, options, masked, first_new)
                folded = fold(State(*(tensor[part] for tensor in state)), attended)
                for tensor, new in zip(state, folded, strict=True):
                    tensor[part] = new
        if sinks is not None:
            sink = sinks.to(dtype).view(heads).expand(num_new, *heads)
            state = fold(state, State(sink, torch.ones_like(sink), torch.zeros_like(q)))
        finish(state, out[queries].view_as(q), None if lse is None else lse[queries].view(num_new, *heads))


def _first_seen(first_new: int, window: int) -> int:
    """Return the first position that the first query of a sequence sees."""
    return max(0, first_new - window + 1) if window else 0


def check_tables(
    block_table: torch.Tensor,
    seq_lens: list[int],
    starts: list[int],
    window: int,
    mask: torch.Tensor | None,
    *,
    num_tokens: int,
    pages_shape: torch.Size,
) -> None:
    """Check every row before any is computed."""
    num_blocks, block_size = pages_shape[:2]
    for i, (start, least) in enumerate(zip(starts, [0, *starts], strict=False)):
        if not least <= start <= (num_tokens if i else 0):
            what = f"offsets that ascend from 0 to at most {num_tokens}"
            raise UsageError(f"query_start_loc[{i}]: expected {what}, got {start}, in paged_attention")
    max_len = block_table.shape[1] * block_size
    for row, seq_len in enumerate(seq_lens):
        num_new = starts[row + 1] - starts[row]
        if num_new == 0 or seq_len == 0:
            continue
        if not num_new <= seq_len <= max_len:
            what = f"from its {num_new} queries to the table's {max_len} tokens"
            raise UsageError(f"seq_lens[{row}]: expected {what}, got {seq_len}, in paged_attention")
        if mask is not None and mask.shape[1] < num_new:
            what = f"a column for each of the {num_new} new keys of sequence {row}"
            raise UsageError(f"mask: expected {what}, got {mask.shape[1]}, in paged_attention")
        first = _first_seen(seq_len - num_new, window)
        pages = block_table[row, first // block_size : -(-seq_len // block_size)]
        _check_ids(f"block_table[{row}]", pages, num_blocks, "paged_attention")


def _read(
    table: torch.Tensor,
    seen: range,
    begin: int,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
    dtype: torch.dtype,
) -> Keys:
    """Gather the keys at the positions `seen`, with zeros from `begin` on in front of them."""
    block_size = key_pages.shape[1]
    positions = torch.arange(seen.start, seen.stop, device=table.device)
    places = table[positions // block_size].long(), positions % block_size

    def read(pages: torch.Tensor) -> torch.Tensor:
        found = _bits(pages)[places].view(pages.dtype).to(dtype)
        return torch.cat([found.new_zeros(seen.start - begin, *found.shape[1:]), found])

    keys, values = read(key_pages), read(value_pages)
    if value_scales is not None:
        values = values * read(value_scales)[..., None]
    return Keys(begin, keys, values, None if key_scales is None else read(key_scales))


def _attend(
    query: torch.Tensor,
    position: int,
    split: Keys,
    options: Options,
    mask: torch.Tensor | None,
    first_new: int,
) -> State:
    """Attend from queries [num_queries, num_kv_heads, group, head_dim] at `position` on to a split's keys."""
    # [head_dim, num_queries, num_kv_heads, group, num_keys]: the dimension that is summed comes first.
    q = query.movedim(-1, 0).contiguous()[..., None]
    k = split.keys.permute(2, 1, 0).contiguous()[:, None, :, None]
    logits = _sum(len(q), lambda dims: q[dims] * k[dims]) * options.scale
    if split.scales is not None:
        logits = logits * split.scales.T[:, None]
    if options.soft_cap:
        logits = options.soft_cap * _rounded(torch.tanh, logits / options.soft_cap)
    at = torch.arange(position, position + len(query), device=query.device)[:, None]
    keys_at = torch.arange(split.begin, split.begin + len(split.keys), device=query.device)
    distance = keys_at - at  # [num_queries, num_keys]
    seen = torch.ones_like(distance, dtype=torch.bool)
    if options.causal:
        seen &= distance <= 0
    if options.window:
        seen &= distance.abs() < options.window
    if options.alibi_slopes is not None:
        logits = logits + options.alibi_slopes * distance[:, None, None].to(query.dtype)
    if mask is not None:
        column = (keys_at - first_new).clamp(0, mask.shape[1] - 1)
        is_new = keys_at >= first_new
        if mask.dtype == torch.bool:
            seen &= mask[:, column] | ~is_new
        else:
            added = torch.where(is_new, mask[:, column], 0).to(query.dtype)
            seen &= added != -inf
            logits = logits + added[:, None, None]
    logits = torch.where(seen[:, None, None], logits, -inf)
    largest = logits.amax(-1)
    weights = _rounded(torch.exp, logits - _finite(largest)[..., None]).movedim(-1, 0).contiguous()
    v, is_seen = split.values[:, None, :, None], seen.T[:, :, None, None, None]

    def weighted(keys: slice) -> torch.Tensor:
        # Not a product with a weight of 0: another query's value may be infinite.
        return torch.where(is_seen[keys], weights[keys][..., None] * v[keys], 0)

    return State(largest, _sum(len(v), lambda keys: weights[keys]), _sum(len(v), weighted))


def fold(state: State, other: State) -> State:
    """Put two states of disjoint keys together."""
    largest = torch.maximum(state.largest, other.largest)
    a = _rounded(torch.exp, state.largest - _finite(largest))
    b = _rounded(torch.exp, other.largest - _finite(largest))
    values = state.values * a[..., None] + other.values * b[..., None]
    return State(largest, state.total * a + other.total * b, values)


def finish(state: State, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Write what a state amounts to."""
    nothing = state.total == 0
    values = state.values / torch.where(nothing, 1, state.total)[..., None]
    out.copy_(values + 0.0)  # a zero has no sign: splits without a key would change it
    if lse is not None:
        lse.copy_(state.largest + _rounded(torch.log, state.total))


@torch.no_grad()
def merge_attention_states(
    outs: torch.Tensor,
    lses: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Fold the states one after the other, in `dtype`."""
    lses = lses.to(dtype)
    # A state that saw nothing has no value, whatever is in its place.
    outs = torch.where(lses[..., None] == -inf, 0, outs.to(dtype))
    states = [
        State(largest, (largest != -inf).to(dtype), values)
        for largest, values in zip(lses, outs, strict=True)
    ]
    state = states[0]
    for other in states[1:]:
        state = fold(state, other)
    finish(state, out, lse)


def _sum(num_terms: int, make_terms: Callable[[slice], torch.Tensor]) -> torch.Tensor:
    """Add terms, 16 at a time and neighbours first, so that zeros behind the last change no bit."""
    total: torch.Tensor | float = 0.0  # and −0 + 0 is 0: nor do they change a sign
    for begin in range(0, num_terms, 16):
        terms = make_terms(slice(begin, begin + 16))
        while len(terms) > 1:
            if len(terms) % 2:
                terms = torch.cat([terms, torch.zeros_like(terms[:1])])
            terms = terms[0::2] + terms[1::2]
        total = total + terms[0]
    assert isinstance(total, torch.Tensor)
    return total


def _rounded(function: Callable[[torch.Tensor], torch.Tensor], numbers: torch.Tensor) -> torch.Tensor:
    """Take `function` in float64: torch takes other code, and its last bits, by where a number lies."""
    return function(numbers.double()).to(numbers.dtype)


def _finite(largest: torch.Tensor) -> torch.Tensor:
    """0 for −inf, which can't be subtracted from itself."""
    return torch.where(largest == -inf, 0, largest)
