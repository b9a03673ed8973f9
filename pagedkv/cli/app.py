"""The commands of `pagedkv`, and what becomes of an error.

A new command is one import and one line below. Its module imports torch, matplotlib and the like inside the
command's function: `pagedkv info` and `--help` must answer at once, and without them.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from pagedkv import __version__
from pagedkv.cli.bench_serve import serve as bench_serve
from pagedkv.cli.breakeven import breakeven
from pagedkv.cli.demo import demo
from pagedkv.cli.hash import hash_files
from pagedkv.cli.info import info
from pagedkv.cli.inspect import inspect
from pagedkv.cli.lint import lint
from pagedkv.cli.plan import plan
from pagedkv.cli.run import run as run_prompts
from pagedkv.cli.simulate import simulate_traces
from pagedkv.errors import PagedKVError

app = typer.Typer(
    name="pagedkv",
    help="The KV cache that an inference engine imports.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command()(info)
app.command()(demo)
app.command("run")(run_prompts)
app.command("hash")(hash_files)
app.command()(inspect)
app.command("simulate")(simulate_traces)
app.command()(plan)
app.command()(breakeven)
app.command()(lint)

bench = typer.Typer(help="Measure this machine under a load.", no_args_is_help=True)
bench.command("serve")(bench_serve)
app.add_typer(bench, name="bench")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"pagedkv {__version__}")
        raise typer.Exit


VersionOption = typer.Option(
    "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
)


@app.callback()
def _options(version: Annotated[bool, VersionOption] = False) -> None:
    # Its option is all that this does.
    pass


def run() -> int:
    """Run the command that `sys.argv` names.

    Returns
    -------
    int
        The exit code. An error of ours becomes one sentence on stderr and 2; any other exception is a bug and
        keeps its traceback.
    """
    try:
        app()
    except PagedKVError as error:
        print(f"pagedkv: {error}", file=sys.stderr)
        return 2
    return 0
