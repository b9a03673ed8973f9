"""What `import pagedkv` costs and needs."""

from __future__ import annotations

import inspect
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pagedkv

HEAVY = ("torch", "triton", "typer", "rich", "matplotlib", "transformers")
# Any import of torch fails from here on, also one that is caught.
NO_TORCH = "import sys; sys.modules['torch'] = None\n"


def run_python(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_importing_pagedkv_imports_nothing_heavy() -> None:
    loaded = run_python("import sys, pagedkv; print(*sys.modules)").split()
    assert "pagedkv" in loaded
    assert not set(HEAVY).intersection(loaded)


def test_blocks_are_hashed_without_torch() -> None:
    hashes = run_python(NO_TORCH + "import pagedkv\nfor h in pagedkv.hash_blocks(range(48)): print(h.hex())")
    assert len(hashes.split()) == 3
    assert hashes.split() == [h.hex() for h in pagedkv.hash_blocks(range(48))]


def test_the_pool_works_without_torch() -> None:
    answer = run_python(
        NO_TORCH + "import pagedkv\n"
        "pool = pagedkv.BlockPool(8)\n"
        "with pool.open(range(40)) as first:\n"
        "    pool.commit(pool.reserve(first, 40))\n"
        "print(pool.match(range(48)).num_block_tokens)"
    )
    assert answer == "32\n"


def test_source_without_a_core_says_so(tmp_path: Path) -> None:
    source = Path(inspect.getfile(pagedkv)).parent
    shutil.copytree(source, tmp_path / "pagedkv", ignore=shutil.ignore_patterns("_core.*.so", "__pycache__"))
    started_beside_it = [sys.executable, "-S", "-c", "import pagedkv"]  # -S: an editable install comes first
    result = subprocess.run(started_beside_it, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert result.returncode == 1
    assert f"expected the compiled core, got none in {tmp_path / 'pagedkv'}" in result.stderr


def test_the_version_is_the_installed_one() -> None:
    assert pagedkv.__version__ == version("pagedkv")


def test_the_package_is_marked_as_typed() -> None:
    assert (Path(pagedkv.__path__[0]) / "py.typed").is_file()
    assert (Path(pagedkv.__path__[0]) / "_core.pyi").is_file()


def test_public_names_are_there_and_documented() -> None:
    for name in pagedkv.__all__:
        public = getattr(pagedkv, name)
        assert public.__doc__ or not (inspect.isclass(public) or inspect.isfunction(public)), name
