"""The build switches of setup.py. They are not part of the package, so they come from the source tree."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def build_support(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


def test_a_flag_is_zero_one_or_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    from build_support.switches import BuildError, read_flag

    for value, meaning in {"": None, "0": False, "1": True}.items():
        monkeypatch.setenv("PAGEDKV_BUILD_CUDA", value)
        assert read_flag("PAGEDKV_BUILD_CUDA") is meaning
    monkeypatch.delenv("PAGEDKV_BUILD_CUDA")
    assert read_flag("PAGEDKV_BUILD_CUDA") is None
    monkeypatch.setenv("PAGEDKV_BUILD_CUDA", "yes")
    with pytest.raises(BuildError, match="PAGEDKV_BUILD_CUDA: expected 0 or 1, got 'yes'"):
        read_flag("PAGEDKV_BUILD_CUDA")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("thread", ["thread"]),
        ("undefined, address", ["address", "undefined"]),
        ("address,", ["address"]),
    ],
)
def test_sanitizers_are_a_comma_list(monkeypatch: pytest.MonkeyPatch, text: str, names: list[str]) -> None:
    from build_support.switches import read_sanitizers

    monkeypatch.setenv("PAGEDKV_SANITIZE", text)
    assert read_sanitizers() == names


@pytest.mark.parametrize("text", ["adress", "1", "address,thread", "thread,leak", "address;undefined"])
def test_unknown_and_incompatible_sanitizers_are_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    from build_support.switches import BuildError, read_sanitizers

    monkeypatch.setenv("PAGEDKV_SANITIZE", text)
    with pytest.raises(BuildError, match=f"PAGEDKV_SANITIZE: expected .* got '{text}'"):
        read_sanitizers()


def test_architectures_become_machine_code_and_ptx_only_where_asked() -> None:
    from build_support.cuda import gencode_flags, parse_archs

    assert gencode_flags(parse_archs("80, 90a;100+PTX")) == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_100,code=sm_100",
        "-gencode=arch=compute_100,code=compute_100",
    ]


@pytest.mark.parametrize("text", ["sm_80", "8.0", "PTX", "80+ptx", "all", " , "])
def test_a_malformed_architecture_is_refused(text: str) -> None:
    from build_support.cuda import parse_archs
    from build_support.switches import BuildError

    with pytest.raises(BuildError, match="PAGEDKV_CUDA_ARCHS: expected a list such as"):
        parse_archs(text)


def test_architectures_that_can_not_be_compiled_for_are_parted_from_the_others() -> None:
    from build_support.cuda import split_by_support

    known, unknown = split_by_support(
        ["75", "80", "90a+PTX", "999", "9"], "compute_75\ncompute_80\ncompute_90\ncompute_100\n"
    )
    assert known == ["80", "90a+PTX"]
    assert unknown == ["75", "999", "9"]


@pytest.fixture
def source_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty project folder without any nvcc, as the current folder."""
    for name in ("CUDA_HOME", "CUDA_PATH", "PAGEDKV_BUILD_CUDA", "PAGEDKV_CUDA_ARCHS"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "csrc/cuda").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def put_nvcc(folder: Path, exit_code: int = 0) -> Path:
    """Put a stand-in for nvcc there: it knows 80 and 90, makes empty files, and notes how it was called."""
    nvcc = folder / "nvcc"
    folder.mkdir(parents=True, exist_ok=True)
    nvcc.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = --list-gpu-arch ]; then echo compute_80; echo compute_90; exit 0; fi\n'
        "for target; do :; done\n"
        ': > "$target"\n'
        'echo "$@" >> calls\n'
        f"exit {exit_code}\n"
    )
    nvcc.chmod(0o755)
    return nvcc


def build(target: Path) -> tuple[bool, list[str]]:
    from build_support.cuda import build_cuda

    said: list[str] = []
    return build_cuda(target, said.append), said


def test_cuda_home_goes_before_path(source_tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from build_support.cuda import find_nvcc

    assert find_nvcc() is None
    in_path = put_nvcc(source_tree / "bin")
    assert find_nvcc() == in_path.resolve()
    in_cuda_path = put_nvcc(source_tree / "with space/bin")
    monkeypatch.setenv("CUDA_PATH", str(source_tree / "with space"))
    assert find_nvcc() == in_cuda_path.resolve()
    in_cuda_home = put_nvcc(source_tree / "home/bin")
    monkeypatch.setenv("CUDA_HOME", str(source_tree / "home"))
    assert find_nvcc() == in_cuda_home.resolve()


def test_without_sources_there_is_no_library_and_the_log_says_so(source_tree: Path) -> None:
    put_nvcc(source_tree / "bin")
    built, said = build(source_tree / "out.so")
    assert not built
    assert said == ["CUDA: not built: there are no sources in csrc/cuda: this version has no CUDA kernels"]


def test_a_library_left_by_an_earlier_build_is_removed(source_tree: Path) -> None:
    stale = source_tree / "out.so"
    stale.touch()
    assert not build(stale)[0]
    assert not stale.exists()


def test_an_nvcc_that_works_gets_the_default_architectures(source_tree: Path) -> None:
    put_nvcc(source_tree / "bin")
    (source_tree / "csrc/cuda/kernel.cu").touch()
    built, _ = build(source_tree / "out.so")
    compiling, linking = (source_tree / "calls").read_text().splitlines()
    assert built
    assert "-c csrc/cuda/kernel.cu" in compiling
    assert "-cudart=static -shared" in linking
    for command in (compiling, linking):
        assert [word for word in command.split() if word.startswith("-gencode")] == [
            "-gencode=arch=compute_80,code=sm_80",
            "-gencode=arch=compute_90,code=sm_90",
            "-gencode=arch=compute_90,code=compute_90",
        ]


def test_every_source_is_compiled_and_linked(source_tree: Path) -> None:
    put_nvcc(source_tree / "bin")
    for name in ("one", "two", "three"):
        (source_tree / f"csrc/cuda/{name}.cu").touch()
    assert build(source_tree / "out.so")[0]
    *compiling, linking = (source_tree / "calls").read_text().splitlines()
    assert len(compiling) == 3
    assert all(f"/{name}.o" in linking for name in ("one", "two", "three"))


def test_an_unknown_architecture_is_left_out_with_a_message(
    source_tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvcc = put_nvcc(source_tree / "bin")
    (source_tree / "csrc/cuda/kernel.cu").touch()
    monkeypatch.setenv("PAGEDKV_CUDA_ARCHS", "80,120")
    built, said = build(source_tree / "out.so")
    assert built
    assert said[0] == f"CUDA: architecture 120 is older than 80 or unknown to {nvcc}; it is left out"
    assert "compute_120" not in (source_tree / "calls").read_text()


@pytest.mark.parametrize("obstacle", ["no sources", "no nvcc", "nvcc fails", "no known architecture"])
def test_an_obstacle_ends_the_build_only_when_cuda_was_asked_for(
    source_tree: Path, monkeypatch: pytest.MonkeyPatch, obstacle: str
) -> None:
    from build_support.switches import BuildError

    if obstacle != "no nvcc":
        put_nvcc(source_tree / "bin", exit_code=2 if obstacle == "nvcc fails" else 0)
    if obstacle != "no sources":
        (source_tree / "csrc/cuda/kernel.cu").touch()
    if obstacle == "no known architecture":
        monkeypatch.setenv("PAGEDKV_CUDA_ARCHS", "120")
    built, said = build(source_tree / "out.so")
    assert not built
    assert said[-1].startswith("CUDA: not built: ")
    monkeypatch.setenv("PAGEDKV_BUILD_CUDA", "1")
    with pytest.raises(BuildError, match="PAGEDKV_BUILD_CUDA=1, but the CUDA library can't be built: "):
        build(source_tree / "out.so")
    monkeypatch.setenv("PAGEDKV_BUILD_CUDA", "0")
    assert build(source_tree / "out.so") == (False, ["CUDA: switched off by PAGEDKV_BUILD_CUDA=0"])
