"""The operators ``torch.ops.pagedkv.*``: schemas, what they run, and what tracing has to know of them.

A schema marks what is modified and returns nothing, so a graph may hold every operator. The last argument is
the name of the backend, "" for the best one: which that is gets decided when the operator runs, not when it
is traced. The arguments are not checked here; :mod:`pagedkv.ops` has the entries that do.
"""

from __future__ import annotations

from typing import Any

import torch

from pagedkv.kernels import choose_backend

SCHEMAS = {
    "write_kv": (
        "Tensor key, Tensor value, Tensor(a!) key_pages, Tensor(b!) value_pages, Tensor slot_mapping, "
        "Tensor(c!)? key_scales, Tensor(d!)? value_scales"
    ),
    "paged_attention": (
        "Tensor query, Tensor key_pages, Tensor value_pages, Tensor block_table, Tensor seq_lens, "
        "Tensor query_start_loc, Tensor(a!) out, Tensor(b!)? lse, float scale, bool causal, int window, "
        "float soft_cap, Tensor? alibi_slopes, Tensor? sinks, Tensor? mask, Tensor? key_scales, "
        "Tensor? value_scales, Tensor? prefix_groups, Tensor? prefix_rows"
    ),
    # Without options: each argument of an operator takes a fifth of a microsecond.
    "paged_attention.plain": (
        "Tensor query, Tensor key_pages, Tensor value_pages, Tensor block_table, Tensor seq_lens, "
        "Tensor query_start_loc, Tensor(a!) out, float scale"
    ),
    "copy_blocks": "Tensor(a!) blocks, Tensor sources, Tensor destinations",
    "gather_blocks": "Tensor blocks, Tensor block_ids, Tensor(a!) buffer",
    "scatter_blocks": "Tensor buffer, Tensor block_ids, Tensor(a!) blocks",
    "merge_attention_states": "Tensor outs, Tensor lses, Tensor(a!) out, Tensor(b!)? lse",
}

_library: Any = torch.library.Library("pagedkv", "DEF")  # type: ignore[no-untyped-call]  # torch's own


def _register(name: str, arguments: str) -> None:
    function = name.partition(".")[0]

    def run(*given: Any) -> None:
        getattr(choose_backend(given[-1], given[0]), function)(*given[:-1])

    def run_plain(*given: Any) -> None:
        *tensors, scale, backend = given
        attention = choose_backend(backend, given[0]).paged_attention
        attention(*tensors, None, scale, True, 0, 0.0, None, None, None, None, None, None, None)

    def trace(*given: Any) -> None:
        """Nothing to say of shapes: whatever is written, the caller has allocated."""

    _library.define(f"{name}({arguments}, str backend) -> ()")
    _library.impl(name, run_plain if name.endswith(".plain") else run, "CompositeExplicitAutograd")
    # Pages outlive every graph, so nothing here has a derivative.
    _library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"pagedkv::{name}", trace, lib=_library)


for _name, _arguments in SCHEMAS.items():
    _register(_name, _arguments)
