"""The rows: what is done, who else does it, and what has to hold."""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.bounds import Bound, absolute, at_most, faster

# Series beside those of the libraries: what the machine needs at least, …
SHA, CHASE, COPY, COMPRESSION = "bare SHA-256 loop", "pointer chase", "memcpy", "one compression"
# … what else the row is compared with, …
NATIVE_CHAIN, NATIVE_BATCH, ONE_BY_ONE = "native chain", "native batch", "one by one"
SMALL_POOL = "small pool"
# … and the same work for prompts with an identity of their own.
NUM_MEDIA = 64
PLAIN, SALT, ADAPTER, MEDIA = "plain", "salt", "adapter", f"{NUM_MEDIA} media items"

# What `open` does, it matches, and says where the KV lies.
SGLANG_OPEN = "SGLang, with slots"

# log2 of ten million blocks over log2 of the pool beside it: what a search may grow by.
WARM_GROWTH, CHURN_GROWTH = 1.66, 1.79

# How far from the machine's floor a row may be that does much besides what the floor does: a quarter further
# than on the slowest machine of docs/design/benchmarks.md, so that what misses one has become slower.
COLD_ALARM, DECODE_ALARM, CHURN_ALARM, EVENTS_ALARM, ALONE_ALARM = 2.75, 22, 9.5, 16, 5.6


class Row(NamedTuple):
    """A row of the table.

    Attributes
    ----------
    name : str
        What ``--rows`` takes and the harnesses know it by.
    work, unit : str
        What is done, and what one measurement is of.
    bounds : tuple of Bound
    peers : tuple of str
        Who is measured in the same run.
    harness : str
        Which process of ours measures it.
    quantity : str
        What it is measured in.
    are_pairs : bool
        Whether the samples of all our series were taken in turns, so that bounds hold or not pair by pair.
    limit : str, optional
        The series that says what the machine needs at least.
    num_operations, num_bytes : int
        Additions and multiplications of a unit, and bytes that it must read; 0 where nobody asks.
    """

    name: str
    work: str
    unit: str
    bounds: tuple[Bound, ...]
    peers: tuple[str, ...] = ()
    harness: str = "pagedkv"
    quantity: str = "µs"
    are_pairs: bool = False
    limit: str | None = None
    num_operations: int = 0
    num_bytes: int = 0


def told_apart(name: str, work: str, unit: str, num_compressions: int = 1) -> Row:
    """Make a row that a salt, an adapter or media must not change.

    `num_compressions`: of how many prompts the digests, or what else their blocks need, enter one unit.
    """
    num_own_extras = {SALT: 1, ADAPTER: 1, MEDIA: NUM_MEDIA}  # blocks that carry some
    bounds = tuple(
        Bound(series, ((1.05, PLAIN), (float(num_blocks * num_compressions), COMPRESSION)))
        if num_compressions
        else at_most(1.05, PLAIN, series)
        for series, num_blocks in num_own_extras.items()
    )
    return Row(f"{name}_identity", f"{work}: salt, adapter, media", unit, bounds)


BOTH = ("vLLM", "SGLang")

ROWS = (
    Row(
        "digest",
        "digests of 10,000 tokens",
        "prompt",
        (at_most(1.2, SHA, NATIVE_CHAIN), faster(15, "vLLM")),
        BOTH,
    ),
    Row(
        "digest_batch",
        "digests of 8 prompts of 2,000 tokens",
        "batch",
        (faster(1.3, ONE_BY_ONE), at_most(1.2 / 1.3, SHA, NATIVE_BATCH)),
    ),
    Row(
        "warm",
        "open, all 10,000 tokens cached by one prompt",
        "prompt",
        (faster(120, "vLLM"), faster(2, SGLANG_OPEN), at_most(4, CHASE)),
        BOTH,
    ),
    Row("warm_touched", "the same, 64 MB touched before", "prompt", (absolute(60), at_most(1.5, CHASE))),
    Row(
        "path",
        "open, along a path that 100 requests built",
        "prompt",
        (faster(5, SGLANG_OPEN), at_most(4, CHASE)),
        ("SGLang",),
    ),
    Row("path_touched", "the same, 64 MB touched before", "prompt", (at_most(1.5, CHASE),)),
    Row(
        "cold",
        "open + reserve + commit, 10,000 new tokens, digests included",
        "prompt",
        (faster(20, "vLLM"), at_most(COLD_ALARM, SHA)),
        BOTH,
    ),
    Row("close", "close 625 blocks", "prompt", (faster(15, "vLLM"), at_most(2, CHASE)), ("vLLM",)),
    Row(
        "decode",
        "decode step of 256 sequences of 2,000 tokens",
        "sequence",
        (faster(40, "vLLM"), at_most(DECODE_ALARM, COPY)),
        ("vLLM",),
    ),
    Row(
        "churn",
        "serve 2,000 tokens, half shared, full pool, digests included",
        "request",
        (faster(25, "vLLM"), faster(5, "SGLang"), at_most(CHURN_ALARM, SHA)),
        BOTH,
    ),
    Row(
        "churn_events",
        "the same with events",
        "request",
        (faster(25, "vLLM"), at_most(EVENTS_ALARM, SHA)),
        BOTH,
    ),
    Row(
        "no_overlap",
        "serve 2,000 tokens that nobody shares, full pool, digests included",
        "request",
        (at_most(0.5, "vLLM, caching off"), at_most(ALONE_ALARM, SHA)),
        BOTH,
    ),
    Row("evict_10k", "evict, 10,000 leaves", "victim", (absolute(0.3), at_most(30, CHASE)), ("SGLang",)),
    Row(
        "evict_10m",
        "evict, 10,000,000 leaves",
        "victim",
        (absolute(0.3), at_most(3, CHASE)),
        harness="pagedkv, 10 million blocks",
    ),
    Row(
        "queue_16",
        "match lengths of 1,024 prompts of 2,000 tokens, 16 prefixes",
        "queue",
        (absolute(1_000), at_most(4, CHASE)),
        ("SGLang",),
    ),
    Row("queue_1024", "the same, 1,024 prefixes", "queue", (absolute(2_500), at_most(2, CHASE)), ("SGLang",)),
    told_apart("digest", "digests of 10,000 tokens", "prompt"),
    told_apart("warm", "open, all cached", "prompt"),
    told_apart("path", "open, along a path", "prompt"),
    told_apart("cold", "10,000 new tokens", "prompt"),
    told_apart("close", "close 625 blocks", "prompt", num_compressions=0),
    told_apart("decode", "decode step", "sequence", num_compressions=0),
    told_apart("churn", "serve 2,000 tokens, half shared", "request"),
    told_apart("no_overlap", "serve 2,000 tokens, none shared", "request"),
    told_apart("queue", "match lengths, 16 prefixes", "queue", num_compressions=1_024),
    Row(
        "memory",
        "memory of a full pool of 10,000,000 blocks, besides pages",
        "block",
        (absolute(240),),
        harness="pagedkv, 10 million blocks",
        quantity="bytes",
    ),
    Row(
        "warm_10m",
        "open, all cached, in a full pool of 10,000,000 blocks",
        "prompt",
        (at_most(WARM_GROWTH, SMALL_POOL),),
        harness="pagedkv, 10 million blocks",
    ),
    Row(
        "churn_10m",
        "serve 2,000 tokens, half shared, from 10,000,000 blocks",
        "request",
        (at_most(CHURN_GROWTH, SMALL_POOL),),
        harness="pagedkv, 10 million blocks",
    ),
)
