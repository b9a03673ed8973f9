"""Time transformers' generate with a PagedSession beside its own cache, on SmolLM2-135M.

    python -m benchmarks.hf [--dtype float32 bfloat16] [--tokens 4000] [--new 64] [--rounds 3] [--json FILE]

All series of a row take turns in one process, and a bound holds or not in the median turn. Exit status:
0, all bounds hold; 1, one is missed. docs/design/benchmarks.md says what each row means.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers.utils.quantization_config import GgufConfig

from pagedkv.contrib.hf import PagedCache
from pagedkv.contrib.hf.probing import cache_argument
from pagedkv.runner.bundled import bundled_model_path

DECODED = 24
"""Tokens that a turn of the decode rows generates; the first two are left out."""


class Row(NamedTuple):
    """Seconds of two series that took turns, and what is asked of their ratio.

    Attributes
    ----------
    name : str
    peer, ours : list of float
        Seconds, one of each for each turn.
    at_least : float
        The least that peer / ours may be in the median turn.
    """

    name: str
    peer_name: str
    peer: list[float]
    ours: list[float]
    at_least: float

    @property
    def ratio(self) -> float:
        """How many times faster ours is."""
        return median(peer / own for peer, own in zip(self.peer, self.ours, strict=True))

    @property
    def holds(self) -> bool:
        """Whether the bound does."""
        return self.ratio >= self.at_least


class Clock(transformers.generation.streamers.BaseStreamer):
    """Notes when each token comes; the first call is the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """Note the time."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing."""

    @property
    def first_token_s(self) -> float:
        """Seconds from the prompt to the first token."""
        return self.times[1] - self.times[0]

    @property
    def token_s(self) -> float:
        """Seconds of a token."""
        times = self.times[3:]
        return (times[-1] - times[0]) / (len(times) - 1)


class Bench:
    """A model, a text, and generate in different ways."""

    def __init__(self, dtype: str, num_shared: int, num_new: int) -> None:
        path = bundled_model_path()
        options: dict[str, Any] = {"dtype": getattr(torch, dtype), "attn_implementation": "sdpa"}
        options |= {"gguf_file": path.name, "quantization_config": GgufConfig(dequantize=True)}
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(path.parent, **options).eval()
        self.model.generation_config.eos_token_id = None
        self.model.generation_config.pad_token_id = 0
        self.argument = cache_argument(self.model)
        self.num_shared, self.num_new = num_shared, num_new
        self.random = torch.Generator().manual_seed(0)
        self.shared = self.draw(num_shared)
        num_blocks = 2 * (num_shared + num_new + DECODED) // 16 + 16
        self.cache = PagedCache.for_model(self.model, num_blocks=num_blocks)

    def draw(self, num_tokens: int) -> torch.Tensor:
        """Return tokens that no other prompt has."""
        return torch.randint(3, self.model.config.vocab_size, (1, num_tokens), generator=self.random)

    def prompt(self) -> torch.Tensor:
        """Return the shared text and a new question."""
        return torch.cat([self.shared, self.draw(self.num_new)], 1)

    def generate(self, ids: torch.Tensor, cache: Any = None, num_tokens: int = 1) -> Clock:
        """Generate greedily, and note when each token came."""
        clock = Clock()
        options = {} if cache is None else {self.argument: cache}
        mask = torch.ones_like(ids)
        self.model.generate(
            ids, attention_mask=mask, max_new_tokens=num_tokens, do_sample=False, streamer=clock, **options
        )
        return clock

    def paged(self, ids: torch.Tensor, num_tokens: int = 1) -> tuple[Clock, float]:
        """Generate with a session; also the seconds that making and closing it took."""
        start = time.perf_counter()
        session = self.cache.session(ids)
        made = time.perf_counter()
        clock = self.generate(ids, session, num_tokens)
        done = time.perf_counter()
        session.close()
        return clock, made - start + time.perf_counter() - done

    def kept(self) -> Any:
        """Return transformers' own cache with the shared text, as a careful user would keep it."""
        cache = transformers.DynamicCache(config=self.model.config)
        with torch.no_grad():
            self.model(self.shared, use_cache=True, logits_to_keep=1, **{self.argument: cache})
        return cache


def crop_to(cache: Any, num_tokens: int) -> None:
    """Cut transformers' cache; releases before 5 take the length and not the difference."""
    newer = int(transformers.__version__.partition(".")[0]) >= 5
    cache.crop(num_tokens - cache.get_seq_length() if newer else num_tokens)


def first_token_rows(bench: Bench, rounds: int) -> list[Row]:
    """Time the first call, the second call, and both against what transformers does."""
    plain: list[float] = []
    cold: list[float] = []
    bench.generate(bench.prompt()[:, : bench.num_new])  # warms up
    for _ in range(rounds):
        ids = bench.prompt()
        plain.append(bench.generate(ids).first_token_s)
        bench.cache.reset()
        clock, extra_s = bench.paged(bench.prompt())
        cold.append(clock.first_token_s + extra_s)
    kept = bench.kept()
    by_hand: list[float] = []
    warm: list[float] = []
    for _ in range(max(rounds, 7)):
        by_hand.append(bench.generate(bench.prompt(), kept).first_token_s)
        crop_to(kept, bench.num_shared)
        clock, extra_s = bench.paged(bench.prompt())
        warm.append(clock.first_token_s + extra_s)
    again = [median(plain)] * len(warm)
    length = f"{bench.num_shared}+{bench.num_new}"
    return [
        Row(f"first call, {length} tokens", "plain generate", plain, cold, 0.97),
        Row(f"second call, {length} tokens", "plain generate", again, warm, 10.0),
        Row(f"second call, {length} tokens", "DynamicCache kept by hand", by_hand, warm, 1.0),
    ]


def decode_rows(bench: Bench, rounds: int) -> list[Row]:
    """Time a token behind the shared text: gathered pages and pages in place, against DynamicCache."""
    kept, own = bench.kept(), {"sdpa": [], "pagedkv": []}
    dynamic: dict[str, list[float]] = {"sdpa": [], "pagedkv": []}
    bench.paged(bench.shared)
    for _ in range(rounds):
        for attention, times in own.items():
            dynamic[attention].append(bench.generate(bench.prompt(), kept, DECODED).token_s)
            crop_to(kept, bench.num_shared)
            bench.model.set_attn_implementation(attention)
            times.append(bench.paged(bench.prompt(), DECODED)[0].token_s)
            bench.model.set_attn_implementation("sdpa")
    name = f"decode at {bench.num_shared} tokens"
    return [
        Row(f"{name}, pages gathered", "DynamicCache, sdpa", dynamic["sdpa"], own["sdpa"], 1.0),
        Row(f"{name}, pages in place", "DynamicCache, sdpa", dynamic["pagedkv"], own["pagedkv"], 1.2),
    ]


def report(console: Console, title: str, rows: list[Row]) -> None:
    """Print a table."""
    table = Table("what", "beside", "theirs", "ours", "faster", "bound", title=title)
    for row in rows:
        verdict = "" if row.holds else " [bold]missed[/bold]"
        seconds = (f"{1000 * median(times):.1f} ms" for times in (row.peer, row.ours))
        bound = f"≥ {row.at_least:g} ×{verdict}"
        table.add_row(row.name, row.peer_name, *seconds, f"{row.ratio:.2f} ×", bound)
    console.print(table)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.hf",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    dtypes = ["float32", "bfloat16"]
    parser.add_argument("--dtype", nargs="+", choices=dtypes, default=dtypes, help="of the model (both)")
    parser.add_argument("--tokens", type=int, default=4000, help="of the text that prompts share (4000)")
    parser.add_argument("--new", type=int, default=64, help="of each prompt's own end (64)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each series (3)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch (all cores)")
    parser.add_argument("--rows", nargs="+", choices=["first", "decode"], default=["first", "decode"])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Measure, report, and say whether all bounds hold."""
    options, console = parse(arguments), Console()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    measure: dict[str, Callable[[Bench, int], list[Row]]] = {"first": first_token_rows, "decode": decode_rows}
    measured: dict[str, list[Row]] = {}
    for dtype in options.dtype:
        with console.status(f"loading SmolLM2-135M in {dtype}") as status:
            bench = Bench(dtype, options.tokens, options.new)
            rows: list[Row] = []
            for name in options.rows:
                status.update(f"{dtype}: {name}")
                rows += measure[name](bench, options.rounds)
            bench.cache.close()
        measured[dtype] = rows
        title = f"transformers {transformers.__version__}, SmolLM2-135M, {dtype}, {options.threads} threads"
        report(console, title, rows)
    if options.json:
        options.json.write_text(json.dumps({d: [r._asdict() for r in rows] for d, rows in measured.items()}))
    return 0 if all(row.holds for rows in measured.values() for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
