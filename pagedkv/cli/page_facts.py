"""What a snapshot says in numbers: totals by state, priority, tenant and depth, and what is evicted next."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv import PoolSnapshot
from pagedkv.snapshot import STATES

NUM_NEXT = 10
"""Pages told one by one, of those that are evicted next."""

Mask = npt.NDArray[np.bool_]


def collect_facts(snapshot: PoolSnapshot, *, show_salts: bool) -> dict[str, Any]:
    """Gather all that `pagedkv inspect` shows besides the map, as values that JSON can hold.

    Parameters
    ----------
    snapshot : PoolSnapshot
    show_salts : bool
        Name tenants by their salts too; these may be secret.
    """
    published = snapshot.depth >= 0
    return {
        "num_blocks": snapshot.num_blocks,
        "block_size": snapshot.block_size,
        "now_s": snapshot.now_s,
        "states": {name: int((snapshot.state == i).sum()) for i, name in enumerate(STATES)},
        "num_shared": int((snapshot.num_refs > 1).sum()),
        "priorities": [
            {"priority": int(priority), **_ends(snapshot, published & (snapshot.priority == priority))}
            for priority in np.unique(snapshot.priority[published])[::-1]
        ],
        "tenants": _tenants(snapshot, published, show_salts),
        "depths": _depths(snapshot, published),
        "next": [_page(snapshot, int(page)) for page in snapshot.next_evicted(NUM_NEXT)],
    }


def _totals(snapshot: PoolSnapshot, pages: Mask) -> dict[str, int]:
    num_pages = int(pages.sum())
    num_held = int((pages & (snapshot.num_refs > 0)).sum())
    return {"num_pages": num_pages, "num_held": num_held, "num_evictable": num_pages - num_held}


def _ends(snapshot: PoolSnapshot, pages: Mask) -> dict[str, Any]:
    """Totals of the pages of one priority, and when it lapses."""
    left_s = snapshot.retained_s[pages]
    ending_s = left_s[(left_s > 0) & np.isfinite(left_s)]
    return {
        **_totals(snapshot, pages),
        "num_for_good": int(np.isposinf(left_s).sum()),
        "num_with_end": len(ending_s),
        "next_end_s": _seconds(ending_s.min()) if len(ending_s) else None,
    }


def _tenants(snapshot: PoolSnapshot, published: Mask, show_salts: bool) -> list[dict[str, Any]]:
    rows = []
    for i, salt in enumerate(snapshot.salts):
        row = {"tenant": i, **_totals(snapshot, published & (snapshot.tenant == i))}
        rows.append({**row, "salt": _readable(salt)} if show_salts else row)
    nobody = {"tenant": None, **_totals(snapshot, published & (snapshot.tenant < 0))}
    return [*rows, nobody] if rows else []


def _depths(snapshot: PoolSnapshot, published: Mask) -> list[dict[str, Any]]:
    """Totals of the first blocks of prompts, of the second ones, of the next two, the next four and so on."""
    rows = []
    deepest = int(snapshot.depth.max(initial=-1))
    first, last = 0, 0
    while first <= deepest:
        pages = published & (snapshot.depth >= first) & (snapshot.depth <= last)
        rows.append({"first": first, "last": last, **_totals(snapshot, pages)})
        first, last = last + 1, 2 * last + 1
    return rows


def _page(snapshot: PoolSnapshot, page: int) -> dict[str, Any]:
    depth, left_s = int(snapshot.depth[page]), float(snapshot.retained_s[page])
    tenant = int(snapshot.tenant[page])
    return {
        "page": page,
        "tokens": [depth * snapshot.block_size, (depth + 1) * snapshot.block_size],
        "priority": int(snapshot.priority[page]),
        "retained": left_s > 0,
        "ends_in_s": _seconds(left_s) if 0 < left_s < np.inf else None,
        "idle_s": _seconds(snapshot.idle_s[page]),
        "tenant": None if tenant < 0 else tenant,
    }


def _seconds(value: Any) -> float | None:
    """Round a time to what can matter; None for nan."""
    return None if np.isnan(value) else round(float(value), 3)


def _readable(salt: bytes) -> str:
    """Show a salt as text where it is that, else in hexadecimal."""
    try:
        text = salt.decode()
    except UnicodeDecodeError:
        text = ""
    return text if text.isprintable() and text else f"0x{salt.hex()}"
