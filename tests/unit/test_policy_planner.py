"""A plan's bytes are arithmetic, and what it says fits does fit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkv import KVCacheSpec, UsageError
from pagedkv.policy import (
    Model,
    find_model,
    make_workload,
    model_from_config,
    needed_blocks,
    plan_memory,
    simulate,
)
from pagedkv.policy.models import LayerGroup
from pagedkv.policy.planner import window_blocks

GIB = 2**30


def test_ten_thousand_tokens_of_the_example_take_what_arithmetic_says() -> None:
    config = {"num_hidden_layers": 32, "num_key_value_heads": 8, "head_dim": 128}
    plan = plan_memory(model_from_config(config), 40 * GIB, dtype="float16", num_tokens=10_000)
    assert plan.kv_bytes == 1_310_720_000
    assert plan.num_blocks == 40 * GIB // (2 * 8 * 128 * 32 * 2 * 16)
    assert plan.concurrent_requests == 40 * GIB // (625 * plan.bytes_per_block) == 32


@given(
    st.integers(1, 8), st.integers(1, 8), st.sampled_from([4, 64]), st.sampled_from(["float32", "int8"]),
    st.booleans(), st.integers(1, 40),
)  # fmt: skip
def test_a_uniform_model_takes_what_its_spec_says(
    layers: int, heads: int, width: int, dtype: str, scales: bool, block_size: int
) -> None:
    scales = scales and dtype == "int8"
    config = {"num_hidden_layers": layers, "num_key_value_heads": heads, "head_dim": width}
    plan = plan_memory(model_from_config(config), GIB, dtype=dtype, scales=scales, block_size=block_size)
    spec = KVCacheSpec.uniform(
        layers, heads, width, dtype, block_size, scales="token_head" if scales else None
    )
    assert plan.bytes_per_token == spec.bytes_per_token
    assert plan.bytes_per_block == spec.bytes_per_block
    assert plan.num_blocks == spec.blocks_in(GIB)


@given(st.integers(1, 200), st.integers(1, 120), st.integers(1, 40))
def test_behind_a_window_are_the_blocks_of_the_tokens_that_any_step_sees(
    num_tokens: int, window: int, block_size: int
) -> None:
    most = max(last // block_size - max(0, last - window + 1) // block_size + 1 for last in range(num_tokens))
    found = window_blocks(num_tokens, window, block_size)
    assert most <= found <= most + 1
    assert window_blocks(num_tokens, None, block_size) == -(-num_tokens // block_size)


GROUPS = st.lists(
    st.builds(
        lambda layers, window, heads: LayerGroup(layers, window, heads, 4, 2 * heads * 4),
        st.integers(1, 3), st.one_of(st.none(), st.integers(1, 90)), st.integers(1, 3),
    ),
    min_size=1, max_size=3,
)  # fmt: skip


@given(GROUPS, st.integers(1, 300), st.integers(0, 300), st.integers(20_000, 2_000_000))
def test_what_is_said_to_fit_fits_and_one_more_does_not(
    groups: list[LayerGroup], num_tokens: int, shared: int, memory: int
) -> None:
    model = Model("drawn", tuple(groups), "float16", 1, 1)
    plan = plan_memory(model, memory, num_tokens=num_tokens, shared_tokens=min(shared, num_tokens))
    own = max(plan.request_bytes - plan.shared_bytes, plan.bytes_per_block)
    count = plan.concurrent_requests
    if count:
        assert plan.shared_bytes + count * own <= memory
    assert plan.shared_bytes + (count + 1) * own > memory
    shares = [row.concurrent_requests for row in plan.cached]
    assert shares[0] == count
    assert shares == sorted(shares, reverse=True)
    for row in plan.cached:
        assert row.cached_tokens // num_tokens * plan.request_bytes <= memory * row.share


def test_layers_that_see_a_window_keep_a_window() -> None:
    plan = plan_memory(find_model("gpt-oss-20b"), GIB, num_tokens=8192)
    full, sliding = plan.groups
    assert (full.blocks_per_request, sliding.blocks_per_request) == (512, 9)
    assert plan.request_bytes == 521 * full.bytes_per_block
    assert plan.kv_bytes == 1024 * full.bytes_per_block


def test_devices_divide_heads_and_repeat_what_cannot_be_divided() -> None:
    whole = find_model("llama-3.1-8b").bytes_per_token()
    for devices, part in ((1, 8), (4, 2), (8, 1), (16, 1)):
        plan = plan_memory(find_model("llama-3.1-8b"), GIB, tensor_parallel=devices)
        assert plan.bytes_per_token == whole * part // 8
    latent = find_model("deepseek-v3")
    assert plan_memory(latent, GIB, tensor_parallel=8).bytes_per_token == latent.bytes_per_token()


def test_the_layout_turns_the_page_and_changes_no_size() -> None:
    model = find_model("llama-3.1-8b")
    one, other = (plan_memory(model, GIB, layout=layout) for layout in ("NHD", "HND"))
    assert (one.groups[0].page_shape, other.groups[0].page_shape) == ((16, 8, 128), (8, 16, 128))
    assert one.bytes_per_block == other.bytes_per_block


@pytest.mark.parametrize(
    "wrong",
    [
        {"memory": "much"}, {"memory": 1}, {"dtype": "float7"}, {"layout": "DHN"}, {"block_size": 0},
        {"num_tokens": 0}, {"shared_tokens": 9000}, {"tensor_parallel": 0},
    ],
)  # fmt: skip
def test_what_can_be_no_plan_is_refused(wrong: dict[str, object]) -> None:
    arguments = {"memory": "1GiB", **wrong}
    memory = arguments.pop("memory")
    with pytest.raises(UsageError):
        plan_memory(find_model("llama-3.1-8b"), memory, **arguments)  # type: ignore[arg-type]


def test_the_size_that_a_trace_needs_reaches_the_share_and_little_less_does_not() -> None:
    trace = make_workload("multi-turn", num_requests=400, seed=2)
    [endless] = simulate(trace, policies=["infinite"], blocks=[1])
    needs = needed_blocks(trace, ["belady", "lfu"])
    assert [(need.policy, need.share) for need in needs] == [
        (policy, share) for policy in ("lru", "lfu", "belady") for share in (0.9, 0.99)
    ]
    of_lru = {need.share: need.blocks for need in needs if need.policy == "lru"}
    for need in needs:
        assert need.blocks is not None
        assert need.blocks_saved == (of_lru[need.share] or 0) - need.blocks
        for blocks, enough in ((need.blocks, True), (int(need.blocks / 1.03), False)):
            [result] = simulate(trace, policies=[need.policy], blocks=[blocks])
            assert (result.hit_blocks >= need.share * endless.hit_blocks) == enough
            if enough:
                assert result.block_hit_rate == need.block_hit_rate


@pytest.mark.parametrize("shares", [[], [0.0], [1.5]])
def test_a_share_that_is_none_is_refused(shares: list[float]) -> None:
    with pytest.raises(UsageError, match="shares"):
        needed_blocks(make_workload("random", num_requests=5), ["lru"], shares=shares)
