"""How many pages an engine's memory has room for."""

from __future__ import annotations

from pagedkv.spec import KVCacheSpec

NUM_WINDOWS = 4
"""How many windows long the requests are for which pages are divided between layers with and without one."""


def pages_within(
    spec: KVCacheSpec, memory: int | str, *, context_length: int, max_batch_tokens: int
) -> int | tuple[int, ...]:
    """Return the pages that `memory` has room for, of each group where there are several.

    Parameters
    ----------
    spec : KVCacheSpec
    memory : int or str
        Bytes, such as ``"512MiB"``.
    context_length, max_batch_tokens : int
        The most tokens of a request, and of a step.
    """
    windows = [window for window in spec.windows if window is not None]
    if len(spec.groups) == 1:
        return spec.blocks_in(memory)
    # Requests of some windows' length use the groups up together. Shorter ones then leave pages for what is
    # kept of other prompts; for the longest that the model takes, windows would have too few to keep any.
    num_tokens = min(context_length, NUM_WINDOWS * max(windows))
    return spec.split(memory, num_tokens, step_tokens=min(max_batch_tokens, num_tokens))
