"""The kernels of paged_attention.

A query's answer is a fold, from left to right, of the states of its splits: `SPLIT` keys at the absolute
positions [s · SPLIT, (s + 1) · SPLIT), each begun from nothing. Who computes a split never changes its bits:
a tile has the same shape and the same sequence of key blocks everywhere, and what a row does not see adds
exactly nothing to it. (A value that one query of a tile sees and another does not has to be finite, for it is
multiplied by a weight of 0; what no query of the tile sees may be anything.)

A tile holds queries of one KV head, the heads that share it side by side: row r is token ``r // HEADS`` and
head ``r % HEADS``. Logits are in units of log 2. Offsets into pages and states are 64-bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagedkv.kernels.triton.numbers import e4m3_to_float16, narrow, tanh

SPLIT_TOKENS = 512
SPLIT = tl.constexpr(SPLIT_TOKENS)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
MEMBERS = tl.constexpr(64)  # of a prefix group, looked at together

# Sizes that change from call to call: no recompilation for a 1 or a multiple of 16.
UNSPECIALIZED = [
    *("num_tokens", "num_seqs", "num_blocks", "max_new", "window"),
    *("num_groups", "num_state_splits", "state_tokens", "group_tiles", "group_pack"),
]


@triton.jit
def _widen(tile, DTYPE: tl.constexpr, SOFT_E4M3: tl.constexpr):
    """Convert what a page holds to what the dot products take; exact for every page dtype."""
    if SOFT_E4M3:
        tile = e4m3_to_float16(tile)
    return tile.to(DTYPE)


@triton.jit
def _visible_keys(num_queries, seq_len, token, valid, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Return every row's position and the keys [first, last) that it may see."""
    position = seq_len - num_queries + token
    first = tl.zeros_like(position)
    last = tl.zeros_like(position) + seq_len
    if WINDOW:
        first = tl.maximum(position - window + 1, 0)
        last = tl.minimum(last, position + window)
    if CAUSAL:
        last = tl.minimum(last, position + 1)
    return position, first, tl.where(valid, last, 0)


@triton.jit
def _attend_blocks(
    begin, end, key_begin, key_end,  # blocks [begin, end); no row sees a key outside [key_begin, key_end)
    q, row_first, row_last, row_position,
    acc, top, total,
    table, num_blocks,
    key_pages, key_block_stride, key_token_stride,
    value_pages, value_block_stride, value_token_stride,
    key_scales, key_scale_block_stride, key_scale_token_stride,
    value_scales, value_scale_block_stride, value_scale_token_stride,
    scale, soft_cap, slope, mask_row, mask_begin, max_new,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, ALIBI: tl.constexpr, MASK: tl.constexpr,
    KEY_SCALES: tl.constexpr, VALUE_SCALES: tl.constexpr, SOFT_E4M3: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the blocks of keys in [begin, end) to a state: accumulator, largest logit, sum of weights."""
    dim = tl.arange(0, PADDED_DIM)
    in_block = tl.arange(0, BLOCK_N)
    for start in range(begin, end, BLOCK_N):
        position = start + in_block
        inside = position < key_end
        if WINDOW:
            inside = inside & (position >= key_begin)
        # A page that there is not reads as zeros: a wrong table must not lead out of the pages.
        if BLOCK_SIZE % BLOCK_N == 0:  # one page holds the whole block of keys
            page = tl.load(table + start // BLOCK_SIZE)
            offset = start % BLOCK_SIZE + in_block
            inside = inside & (in_block < tl.where(page.to(tl.uint32) < num_blocks, BLOCK_N, 0))
        else:
            if BLOCK_N % BLOCK_SIZE == 0:  # whole pages; most of the arithmetic leaves the loop
                page = tl.load(table + start // BLOCK_SIZE + in_block // BLOCK_SIZE, mask=inside, other=0)
                offset = in_block % BLOCK_SIZE
            else:
                page = tl.load(table + position // BLOCK_SIZE, mask=inside, other=0)
                offset = position % BLOCK_SIZE
            inside = inside & (page.to(tl.uint32) < num_blocks)
        page = page.to(tl.int64)
        # Masked loads, not weights of 0: what lies in slots that nobody sees may be NaN.
        k = tl.load(
            (key_pages + page * key_block_stride + offset * key_token_stride)[None, :] + dim[:, None],
            mask=inside[None, :] if HEAD_DIM == PADDED_DIM else inside[None, :] & (dim < HEAD_DIM)[:, None],
            other=0.0,
        )  # fmt: skip
        x = tl.dot(q, _widen(k, q.dtype, SOFT_E4M3), input_precision=PRECISION) * scale
        if KEY_SCALES:
            k_scale = tl.load(
                key_scales + page * key_scale_block_stride + offset * key_scale_token_stride,
                mask=inside, other=0.0,
            )  # fmt: skip
            x = x * k_scale[None, :]
        if SOFT_CAP:
            x = tanh(x) * soft_cap
        if ALIBI:
            x = x + slope[:, None] * (position[None, :] - row_position[:, None]).to(tl.float32)
        visible = position[None, :] < row_last[:, None]
        if WINDOW:
            visible = visible & (position[None, :] >= row_first[:, None])
        if MASK != "none":
            column = position[None, :] - mask_begin[:, None]
            is_new = visible & (column >= 0) & (column < max_new)
            if MASK == "bool":
                visible = visible & (tl.load(mask_row[:, None] + column, mask=is_new, other=1) != 0)
            else:
                x = x + tl.load(mask_row[:, None] + column, mask=is_new, other=0.0) * LOG2_E
        x = tl.where(visible, x, float("-inf"))

        new_top = tl.maximum(top, tl.max(x, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(x - base[:, None])
        rescale = tl.exp2(top - base)
        total = total * rescale + tl.sum(weights, 1)
        top = new_top
        v = tl.load(
            (value_pages + page * value_block_stride + offset * value_token_stride)[:, None] + dim[None, :],
            mask=inside[:, None] if HEAD_DIM == PADDED_DIM else inside[:, None] & (dim < HEAD_DIM)[None, :],
            other=0.0,
        )  # fmt: skip
        v = _widen(v, q.dtype, SOFT_E4M3)
        if VALUE_SCALES:  # onto V, not onto the weights: float16 would lose small products
            v_scale = tl.load(
                value_scales + page * value_scale_block_stride + offset * value_scale_token_stride,
                mask=inside, other=0.0,
            )  # fmt: skip
            v = (v.to(tl.float32) * v_scale[:, None]).to(q.dtype)
        acc = tl.dot(weights.to(q.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
    return acc, top, total


@triton.jit
def _load_query(query, token_stride, head_stride, token, head, valid, DTYPE: tl.constexpr,
                HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr):  # fmt: skip
    """Load a tile of queries; rows that are none are 0."""
    dim = tl.arange(0, PADDED_DIM)
    rows = query + token.to(tl.int64) * token_stride + head * head_stride
    return tl.load(
        rows[:, None] + dim[None, :], mask=valid[:, None] & (dim < HEAD_DIM)[None, :], other=0.0
    ).to(DTYPE)


@triton.jit
def mark_grouped_splits(
    grouped, query_start_loc, prefix_groups, prefix_rows, num_groups, group_tiles, group_pack,
    num_state_splits, state_tokens,
    BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr, NUM_SPLITS: tl.constexpr,
):  # fmt: skip
    """Write for one sequence which of its splits a prefix group computes: whole ones only."""
    seq = tl.program_id(0)
    split = tl.arange(0, NUM_SPLITS)
    num_queries = tl.load(query_start_loc + seq + 1) - tl.load(query_start_loc + seq)
    is_grouped = tl.zeros([NUM_SPLITS], tl.int1)
    tiles = 0  # of the groups so far; groups that share entries of prefix_rows may need more than there are
    for group in range(num_groups):
        rows_begin = tl.load(prefix_groups + group * 4)
        rows_end = tl.load(prefix_groups + group * 4 + 1)
        tiles += tl.cdiv(rows_end - rows_begin, TOKENS // group_pack)
        first = tl.cdiv(tl.load(prefix_groups + group * 4 + 2) * BLOCK_SIZE, SPLIT)
        last = tl.load(prefix_groups + group * 4 + 3) * BLOCK_SIZE // SPLIT
        last = tl.where(tiles <= group_tiles, last, 0)
        for start in range(rows_begin, rows_end, MEMBERS):
            member = start + tl.arange(0, MEMBERS)
            row = tl.load(prefix_rows + member, mask=member < rows_end, other=-1)
            is_member = tl.max((row == seq).to(tl.int32), 0) > 0
            is_grouped = is_grouped | ((split >= first) & (split < tl.where(is_member, last, 0)))
    is_grouped = is_grouped & (split < tl.where(num_queries <= state_tokens, NUM_SPLITS, 0))
    slot = grouped + seq.to(tl.int64) * num_state_splits + split
    tl.store(slot, is_grouped.to(tl.int8), mask=split < num_state_splits)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def compute_states(
    query, query_token_stride, query_head_stride,
    key_pages, key_block_stride, key_token_stride, key_head_stride,
    value_pages, value_block_stride, value_token_stride, value_head_stride,
    key_scales, key_scale_block_stride, key_scale_token_stride, key_scale_head_stride,
    value_scales, value_scale_block_stride, value_scale_token_stride, value_scale_head_stride,
    block_table, block_table_stride, seq_lens, query_start_loc,
    alibi_slopes, mask, mask_stride,
    scale, soft_cap, window, num_seqs, num_blocks, max_new,
    state_acc, state_top, state_total, grouped, num_state_splits, state_tokens,
    prefix_groups, prefix_rows, num_groups, group_tiles, group_pack,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr, HEADS: tl.constexpr, HEAD_TILES: tl.constexpr, NUM_HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, ALIBI: tl.constexpr,
    MASK: tl.constexpr,
    KEY_SCALES: tl.constexpr, VALUE_SCALES: tl.constexpr, SOFT_E4M3: tl.constexpr, NUM_GROUPS: tl.constexpr,
):  # fmt: skip
    """Compute the states of splits that `attend` then folds.

    Grid: (tiles of prefix groups, then sequences; tiles of heads; parts of the splits). A sequence's program
    takes the splits that no group computes; a group's program takes rows of several sequences at once.
    Sequences with more than `state_tokens` queries are left to `attend`.
    """
    item = tl.program_id(0)
    kv_head = tl.program_id(1) // HEAD_TILES
    head_tile = tl.program_id(1) % HEAD_TILES
    TOKENS: tl.constexpr = BLOCK_M // HEADS
    row = tl.arange(0, BLOCK_M)
    row_token = row // HEADS
    head_in_group = head_tile * HEADS + row % HEADS
    head = kv_head * GROUP + head_in_group
    valid = (row_token < TOKENS) & (head_in_group < GROUP)

    seq = item - group_tiles
    pack = tl.zeros_like(item) + TOKENS
    first_split = tl.zeros_like(item)
    last_split = first_split + num_state_splits
    row_seq = tl.zeros_like(row) + seq
    if NUM_GROUPS:
        # Sums and selects, not an `if` or a loop: behind these Triton no longer knows what is dense.
        is_group = item < group_tiles
        members = TOKENS // group_pack
        each = tl.arange(0, NUM_GROUPS)
        num_rows = tl.load(prefix_groups + each * 4 + 1, mask=each < num_groups, other=0)
        num_rows -= tl.load(prefix_groups + each * 4, mask=each < num_groups, other=0)
        tiles = (num_rows + members - 1) // members
        is_before = tl.cumsum(tiles, 0) <= item
        group = tl.sum(is_before.to(tl.int32), 0)
        tile = item - tl.sum(tl.where(is_before, tiles, 0), 0)
        is_found = is_group & (group < num_groups)
        rows_begin = tl.load(prefix_groups + group * 4, mask=is_found, other=0)
        rows_end = tl.load(prefix_groups + group * 4 + 1, mask=is_found, other=0)
        first_block = tl.load(prefix_groups + group * 4 + 2, mask=is_found, other=0)
        last_block = tl.load(prefix_groups + group * 4 + 3, mask=is_found, other=0)
        first_split = tl.where(is_group, tl.cdiv(first_block * BLOCK_SIZE, SPLIT), first_split)
        last_split = tl.where(is_group, tl.minimum(last_block * BLOCK_SIZE // SPLIT, last_split), last_split)
        pack = tl.where(is_group, group_pack, pack)
        first_member = rows_begin + tile * members
        end_member = tl.minimum(first_member + members, rows_end)
        member = first_member + row_token // pack
        is_member = member < end_member
        row_seq = tl.load(prefix_rows + member, mask=is_member, other=0)
        row_seq = tl.where(row < tl.where(is_group, BLOCK_M, 0), row_seq, seq)
        valid = valid & ((row < tl.where(is_group, 0, BLOCK_M)) | is_member)
        seq = tl.load(prefix_rows + first_member, mask=is_found, other=item - group_tiles)

    row_start = tl.load(query_start_loc + row_seq)
    num_queries = tl.load(query_start_loc + row_seq + 1) - row_start
    seq_len = tl.load(seq_lens + row_seq)
    valid = valid & (num_queries <= state_tokens)
    slope = tl.zeros([BLOCK_M], tl.float32)
    if ALIBI:
        slope = tl.load(alibi_slopes + head, mask=head_in_group < GROUP, other=0.0) * LOG2_E
    kv_head = kv_head.to(tl.int64)
    most = tl.max(tl.where(valid, num_queries, 0), 0)
    for first_token in range(0, most, pack):
        token = first_token + row_token % pack
        is_row = valid & (token < num_queries)
        position, row_first, row_last = _visible_keys(
            num_queries, seq_len, token, is_row, window, CAUSAL, WINDOW
        )
        key_end = tl.max(row_last, 0)
        key_begin = tl.min(tl.where(is_row, row_first, key_end), 0)
        q = _load_query(query, query_token_stride, query_head_stride, row_start + token, head, is_row,
                        DTYPE, HEAD_DIM, PADDED_DIM)  # fmt: skip
        mask_row = mask + (row_start + token).to(tl.int64) * mask_stride
        begin = tl.maximum(first_split, key_begin // SPLIT)
        end = tl.minimum(last_split, tl.cdiv(key_end, SPLIT))
        for split in range(begin + tl.program_id(2), end, tl.num_programs(2)):
            # An empty range rather than an `if`, as in `attend`: it keeps the loop over keys as it is.
            first_key = tl.maximum(split * SPLIT, key_begin // BLOCK_N * BLOCK_N)
            last_key = tl.minimum(split * SPLIT + SPLIT, key_end)
            is_stored = is_row
            if NUM_GROUPS:
                is_sequence = item >= group_tiles
                flag = tl.load(
                    grouped + seq.to(tl.int64) * num_state_splits + split, mask=is_sequence, other=0
                )
                last_key = tl.where(flag != 0, first_key, last_key)
                is_stored = is_row & (row < tl.where(flag != 0, 0, BLOCK_M))
            acc, top, total = _attend_blocks(
                first_key, last_key, key_begin, key_end, q, row_first, row_last, position,
                tl.zeros([BLOCK_M, PADDED_DIM], tl.float32),
                tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32),
                block_table + seq.to(tl.int64) * block_table_stride, num_blocks,
                key_pages + kv_head * key_head_stride, key_block_stride, key_token_stride,
                value_pages + kv_head * value_head_stride, value_block_stride, value_token_stride,
                key_scales + kv_head * key_scale_head_stride, key_scale_block_stride, key_scale_token_stride,
                value_scales + kv_head * value_scale_head_stride,
                value_scale_block_stride, value_scale_token_stride,
                scale, soft_cap, slope, mask_row, seq_len - num_queries, max_new,
                BLOCK_SIZE, BLOCK_N, HEAD_DIM, PADDED_DIM, WINDOW, SOFT_CAP, ALIBI, MASK,
                KEY_SCALES, VALUE_SCALES, SOFT_E4M3, PRECISION,
            )  # fmt: skip
            slot = (row_seq.to(tl.int64) * num_state_splits + split) * state_tokens + token
            slot = slot * NUM_HEADS + head
            dim = tl.arange(0, PADDED_DIM)
            tl.store(state_top + slot, top, mask=is_stored)
            tl.store(state_total + slot, total, mask=is_stored)
            tl.store(state_acc + slot[:, None] * HEAD_DIM + dim[None, :], acc,
                     mask=is_stored[:, None] & (dim < HEAD_DIM)[None, :])  # fmt: skip


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attend(
    query, query_token_stride, query_head_stride,
    key_pages, key_block_stride, key_token_stride, key_head_stride,
    value_pages, value_block_stride, value_token_stride, value_head_stride,
    key_scales, key_scale_block_stride, key_scale_token_stride, key_scale_head_stride,
    value_scales, value_scale_block_stride, value_scale_token_stride, value_scale_head_stride,
    block_table, block_table_stride, seq_lens, query_start_loc,
    alibi_slopes, mask, mask_stride,
    scale, soft_cap, window, num_seqs, num_blocks, max_new,
    state_acc, state_top, state_total, grouped, num_state_splits, state_tokens,
    num_tokens, out, out_token_stride, out_head_stride, lse, lse_token_stride, lse_head_stride, sinks,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr, HEADS: tl.constexpr, HEAD_TILES: tl.constexpr, NUM_HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, ALIBI: tl.constexpr,
    MASK: tl.constexpr,
    KEY_SCALES: tl.constexpr, VALUE_SCALES: tl.constexpr, SOFT_E4M3: tl.constexpr,
    STATES: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Answer a tile of queries: fold the states of its splits, those that `compute_states` left and its own.

    Grid: (tiles of queries, tiles of heads). Sequence i has the tiles from
    ``query_start_loc[i] // TOKENS + i`` on, which needs no more tiles than the sizes tell. The tokens behind
    the last sequence are one more sequence, of length 0. STATES: "none", "all" (of every sequence with few
    enough queries) or "grouped".
    """
    TOKENS: tl.constexpr = BLOCK_M // HEADS
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # late tiles see the most keys, so they begin first
    kv_head = tl.program_id(1) // HEAD_TILES
    head_tile = tl.program_id(1) % HEAD_TILES
    seq = tl.zeros_like(tile)  # the last one whose tiles begin at or before this one
    after = num_seqs + 1
    while after - seq > 1:
        middle = (seq + after) // 2
        if tl.load(query_start_loc + middle) // TOKENS + middle <= tile:
            seq = middle
        else:
            after = middle
    start = tl.load(query_start_loc + seq)
    is_sequence = seq < num_seqs
    num_queries = tl.load(query_start_loc + seq + 1, mask=is_sequence, other=0)
    num_queries = tl.where(is_sequence, num_queries, num_tokens) - start
    seq_len = tl.load(seq_lens + seq, mask=is_sequence, other=0)
    first_token = (tile - start // TOKENS - seq) * TOKENS
    if first_token >= num_queries:
        return

    row = tl.arange(0, BLOCK_M)
    token = first_token + row // HEADS
    head_in_group = head_tile * HEADS + row % HEADS
    head = kv_head * GROUP + head_in_group
    is_row = (row // HEADS < TOKENS) & (head_in_group < GROUP) & (token < num_queries)
    position, row_first, row_last = _visible_keys(num_queries, seq_len, token, is_row, window, CAUSAL, WINDOW)
    key_end = tl.max(row_last, 0)
    key_begin = tl.min(tl.where(is_row, row_first, key_end), 0)
    q = _load_query(query, query_token_stride, query_head_stride, start + token, head, is_row,
                    DTYPE, HEAD_DIM, PADDED_DIM)  # fmt: skip
    slope = tl.zeros([BLOCK_M], tl.float32)
    if ALIBI:
        slope = tl.load(alibi_slopes + head, mask=head_in_group < GROUP, other=0.0) * LOG2_E
    mask_row = mask + (start + token).to(tl.int64) * mask_stride
    mask_begin = tl.zeros_like(token) + (seq_len - num_queries)
    kv_head = kv_head.to(tl.int64)
    dim = tl.arange(0, PADDED_DIM)
    is_element = is_row[:, None] & (dim < HEAD_DIM)[None, :]

    out_acc = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
    out_top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    out_total = tl.zeros([BLOCK_M], tl.float32)
    for split in range(key_begin // SPLIT, tl.cdiv(key_end, SPLIT)):
        acc = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        begin = tl.maximum(split * SPLIT, key_begin // BLOCK_N * BLOCK_N)
        end = tl.minimum(split * SPLIT + SPLIT, key_end)
        if STATES != "none":
            has_state = (num_queries <= state_tokens) & (split < num_state_splits)
            if STATES == "grouped":
                has_state = (
                    tl.load(grouped + seq.to(tl.int64) * num_state_splits + split, mask=has_state, other=0)
                    != 0
                )
            end = tl.where(has_state, begin, end)
            slot = (seq.to(tl.int64) * num_state_splits + split) * state_tokens + token
            slot = slot * NUM_HEADS + head
            is_ready = is_row & (row < tl.where(has_state, BLOCK_M, 0))
            top = tl.load(state_top + slot, mask=is_ready, other=float("-inf"))
            total = tl.load(state_total + slot, mask=is_ready, other=0.0)
            acc = tl.load(
                state_acc + slot[:, None] * HEAD_DIM + dim[None, :],
                mask=is_ready[:, None] & (dim < HEAD_DIM)[None, :], other=0.0,
            )  # fmt: skip
        acc, top, total = _attend_blocks(
            begin, end, key_begin, key_end, q, row_first, row_last, position, acc, top, total,
            block_table + seq.to(tl.int64) * block_table_stride, num_blocks,
            key_pages + kv_head * key_head_stride, key_block_stride, key_token_stride,
            value_pages + kv_head * value_head_stride, value_block_stride, value_token_stride,
            key_scales + kv_head * key_scale_head_stride, key_scale_block_stride, key_scale_token_stride,
            value_scales + kv_head * value_scale_head_stride,
            value_scale_block_stride, value_scale_token_stride,
            scale, soft_cap, slope, mask_row, mask_begin, max_new,
            BLOCK_SIZE, BLOCK_N, HEAD_DIM, PADDED_DIM, WINDOW, SOFT_CAP, ALIBI, MASK,
            KEY_SCALES, VALUE_SCALES, SOFT_E4M3, PRECISION,
        )  # fmt: skip
        new_top = tl.maximum(out_top, top)
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        old, new = tl.exp2(out_top - base), tl.exp2(top - base)
        out_acc = out_acc * old[:, None] + acc * new[:, None]
        out_total = out_total * old + total * new
        out_top = new_top

    if SINKS:
        has_sink = head_in_group < tl.where(seq_len > 0, GROUP, 0)  # padding stays empty
        sink = tl.load(sinks + head, mask=has_sink, other=float("-inf")) * LOG2_E
        new_top = tl.maximum(out_top, sink)
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        old = tl.exp2(out_top - base)
        out_acc = out_acc * old[:, None]
        out_total = out_total * old + tl.exp2(sink - base)
        out_top = new_top
    is_empty = out_total == 0.0
    divisor = tl.where(is_empty, 1.0, out_total)
    token_row = (start + token).to(tl.int64)
    # A zero has no sign: splits that add nothing would change it.
    result = narrow(out_acc / divisor[:, None] + 0.0, out.dtype.element_ty, INTERPRET)
    tl.store(
        out + (token_row * out_token_stride + head * out_head_stride)[:, None] + dim[None, :],
        result,
        mask=is_element,
    )
    if LSE:
        value = tl.where(is_empty, float("-inf"), (out_top + tl.log2(divisor)) * LN_2)
        tl.store(lse + token_row * lse_token_stride + head * lse_head_stride, value, mask=is_row)
