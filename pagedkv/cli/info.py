"""`pagedkv info`: what is installed here, what this processor can do, and which backends that leaves."""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pagedkv import __version__, _core, config

PACKAGES = ("numpy", "torch", "triton", "tokenizers", "safetensors", "gguf", "typer", "rich", "matplotlib")
# Instruction sets that a code path may ask for, under the names that Linux gives them.
X86_FEATURES = {"sha_ni", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_bf16"}
AMX_FEATURES = {"amx_tile", "amx_bf16"}
ARM_FEATURES = {"sha2", "asimd", "asimddp", "bf16", "i8mm", "sve"}


def info(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts and bug reports.")] = False,
) -> None:
    """Show versions, CPU features and the backends found, with the reason against each other one."""
    facts = collect_facts()
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        print_facts(facts)


def collect_facts() -> dict[str, Any]:
    """Gather all that `pagedkv info` shows, as values that JSON can hold.

    Raises
    ------
    UsageError
        A PAGEDKV_* variable has a bad value.
    """
    missing_paths = {name: reason for name, reason in _core.sha256_isas().items() if reason}
    return {
        "pagedkv": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _installed_version(name) for name in PACKAGES},
        "cpu": {"cores": os.cpu_count(), **_read_cpuinfo(Path("/proc/cpuinfo"))},
        "sha256": {"in_use": _core.sha256_isa(), "not_available": missing_paths},
        "backend_override": config.read_backend(),
        "backends": _reasons_against_backends(),
        "environment": {v.name: os.environ.get(v.name) for v in config.VARIABLES},
    }


def print_facts(facts: dict[str, Any]) -> None:
    """Show the facts as a table of three columns: what, value, remark."""
    table = Table("", "value", "remark", title=f"pagedkv {facts['pagedkv']}", title_justify="left")
    table.columns[-1].overflow = "fold"
    table.add_row("python", facts["python"], facts["platform"])
    for name, installed in facts["packages"].items():
        table.add_row(name, installed or "[dim]–[/]", "" if installed else "not installed")
    table.add_section()
    table.add_row("processor", facts["cpu"]["name"], f"{facts['cpu']['cores']} cores")
    table.add_row("features", " ".join(facts["cpu"]["features"]) or "[dim]–[/]", "")
    table.add_row("SHA-256", facts["sha256"]["in_use"], "path in use")
    for name, reason in facts["sha256"]["not_available"].items():
        table.add_row("", f"[dim]{name}[/]", reason)
    table.add_section()
    for name, reason in facts["backends"].items():
        table.add_row(f"backend {name}", "[dim]no[/]" if reason else "[green]yes[/]", escape(reason or ""))
    set_variables = {name: value for name, value in facts["environment"].items() if value is not None}
    for name, value in set_variables.items():
        table.add_row(name, value, "from the environment")
    Console().print(table)


def _installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _reasons_against_backends() -> dict[str, str | None]:
    """Why each backend can't be used here; None for one that can."""
    try:
        from pagedkv.ops import why_unavailable
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        missing = "torch is not installed: pip install 'pagedkv[torch]'"
        return {n: missing if n == "reference" else "not in this version" for n in config.BACKEND.choices}
    return {name: why_unavailable(name) for name in get_args(config.Backend)}


def _read_cpuinfo(path: Path) -> dict[str, Any]:
    """Read the processor's name and those of its features that matter to us; Linux alone tells them."""
    if not path.exists():
        return {"name": platform.processor() or platform.machine(), "features": []}
    fields = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
    fields = {name.strip(): value.strip() for name, value in fields.items()}
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    return {
        "name": fields.get("model name") or platform.machine(),
        "features": sorted((X86_FEATURES | AMX_FEATURES | ARM_FEATURES).intersection(flags)),
    }
