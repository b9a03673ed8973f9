"""The command `pagedkv`, also `python -m pagedkv`."""

from __future__ import annotations

import sys

# Which extra brings the package that an import may miss.
EXTRA_OF = {
    "typer": "cli",
    "rich": "cli",
    "matplotlib": "cli",
    "torch": "runner",
    "tokenizers": "runner",
    "safetensors": "runner",
    "gguf": "runner",
    "jinja2": "runner",
}


def main() -> int:
    """Run the command line.

    Returns
    -------
    int
        The exit code: 2 for what the caller can put right, such as a wrong argument or a missing extra.
    """
    try:
        from pagedkv.cli.app import run

        return run()
    except ModuleNotFoundError as error:
        extra = EXTRA_OF.get(error.name or "")
        if extra is None:
            raise
        sys.stderr.write(
            f"pagedkv: this command needs the package '{error.name}'; "
            f"install it with: pip install 'pagedkv[{extra}]'\n"
        )
        return 2


if __name__ == "__main__":
    sys.exit(main())
