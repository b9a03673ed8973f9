"""`pagedkv inspect`: a map that counts right and can be read without colours."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from command import one_sentence, run
from made_snapshots import empty_snapshot, small_snapshot

MAP_LINE = re.compile(r"^ *[\d,]+  ([▒█░×·]+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("snapshots") / "small [1].npz"
    small_snapshot().save(path)
    return path


def shown(*arguments: str | Path, **environment: str) -> str:
    result = run("inspect", *map(str, arguments), **environment)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout


def cells(text: str) -> str:
    return "".join(MAP_LINE.findall(text))


def row(text: str, *beginning: str) -> list[str]:
    """Return the words of the one line that begins with some words."""
    (line,) = [
        words for words in map(str.split, text.splitlines()) if words[: len(beginning)] == [*beginning]
    ]
    return line[len(beginning) :]


def test_every_page_is_a_character_of_its_state(small: Path) -> None:
    text = shown(small)
    assert text.startswith("small [1].npz: 8 pages of 16 tokens, 12.5 s after the pool was made\n")
    assert cells(text) == "█×××█▒··"
    assert row(text, "█", "committed")[:2] == ["2", "25.0%"]
    assert row(text, "▒", "writable")[:2] == ["1", "12.5%"]
    assert row(text, "░", "evictable")[:2] == ["3", "37.5%"]
    assert row(text, "·", "free")[:2] == ["2", "25.0%"]
    assert "held more than once: 1\n" in text


def test_tables_tell_priorities_tenants_depth_and_what_goes_next(small: Path) -> None:
    text = shown(small)
    priorities, rest = text.split("Priorities")[1].split("Tenants")
    tenants, rest = rest.split("Depth")
    depths, following = rest.split("Evicted next")
    assert row(priorities, "70") == ["1", "1", "0", "1", "0"]
    assert row(priorities, "35") == ["3", "1", "2", "0", "0"]
    assert row(priorities, "10") == ["1", "0", "1", "0", "1", "2.5", "s"]
    assert row(tenants, "0") == ["2", "1", "1", "hidden"]
    assert row(tenants, "nobody") == ["1", "1", "0"]
    assert row(depths, "1")[:3] == ["3", "1", "2"]
    assert row(depths, "2", "to", "3")[:3] == ["1", "0", "1"]
    pages = [words.split()[0] for words in following.splitlines()[2:] if words]
    assert pages == ["3", "1", "2"]
    assert row(following, "3") == ["[32,", "48)", "10", "2.5", "s", "0.2", "s", "1"]


def test_salts_are_shown_only_when_asked_for(small: Path) -> None:
    assert "tenant-a" not in shown(small) + shown(small, "--json")
    text = shown(small, "--show-salts")
    assert row(text.split("Tenants")[1].split("Depth")[0], "0") == ["2", "1", "1", "tenant-a"]
    assert "0xff00" in text
    tenants = json.loads(shown(small, "--json", "--show-salts"))["tenants"]
    assert [tenant.get("salt") for tenant in tenants] == ["tenant-a", "0xff00", None]


def test_json_has_the_same_totals(small: Path) -> None:
    facts = json.loads(shown(small, "--json"))
    assert facts["states"] == {"free": 2, "writable": 1, "committed": 2, "evictable": 3}
    assert (facts["num_blocks"], facts["block_size"], facts["now_s"], facts["num_shared"]) == (8, 16, 12.5, 1)
    assert [page["page"] for page in facts["next"]] == [3, 1, 2]
    assert facts["next"][0] == {
        "page": 3,
        "tokens": [32, 48],
        "priority": 10,
        "retained": True,
        "ends_in_s": 2.5,
        "idle_s": 0.25,
        "tenant": 1,
    }
    assert [p["priority"] for p in facts["priorities"]] == [70, 35, 10]
    for rows in (facts["priorities"], facts["tenants"], facts["depths"]):
        assert sum(each["num_pages"] for each in rows) == 5
        assert sum(each["num_held"] for each in rows) == 2


def test_a_large_pool_is_drawn_in_32_lines_by_what_most_pages_are(tmp_path: Path) -> None:
    path = tmp_path / "large.npz"
    snapshot = empty_snapshot(100_000)
    snapshot.state[:50_000] = 1
    snapshot.num_refs[:50_000] = 1
    snapshot.state[0] = 0
    snapshot.save(path)
    text = shown(path, "--width", "80")
    lines = MAP_LINE.findall(text)
    assert len(lines) <= 32
    assert max(map(len, text.splitlines())) <= 80
    num_pages = int(re.search(r"each character is ([\d,]+) pages", text)[1].replace(",", ""))  # type: ignore[index]
    assert len(cells(text)) == -(-100_000 // num_pages)
    assert cells(text).count("▒") == pytest.approx(50_000 / num_pages, abs=1)
    assert cells(text)[0] == "▒"
    assert "Priorities" not in text


def test_width_bounds_every_line(small: Path) -> None:
    path = small.with_name("wide.npz")
    empty_snapshot(500).save(path)
    for width in (40, 60, 200):
        lines = MAP_LINE.findall(shown(path, "--width", str(width)))
        assert sum(map(len, lines)) == 500
        assert max(map(len, lines)) == 2 ** int(np.log2(width - 5))


def test_a_terminal_without_unicode_gets_letters(small: Path) -> None:
    text = shown(small, "--show-salts", PYTHONIOENCODING="ascii")
    assert "#xxx#w.." in text
    assert text.isascii()


def test_colours_repeat_what_the_characters_say(small: Path) -> None:
    text = shown(small, FORCE_COLOR="1", TERM="xterm-256color")
    assert "\x1b[" in text
    assert cells(re.sub(r"\x1b\[[\d;]*m", "", text)) == "█×××█▒··"


@pytest.mark.parametrize("snapshot", [small_snapshot(), empty_snapshot(1), empty_snapshot(70_000)])
def test_plot_writes_a_picture(snapshot: object, tmp_path: Path) -> None:
    snapshot.save(tmp_path / "s.npz")  # type: ignore[attr-defined]
    picture = tmp_path / "map.png"
    text = shown(tmp_path / "s.npz", "--plot", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "pages of 16 tokens" in text


def test_inspect_needs_no_torch_and_a_plot_names_the_package_it_needs(small: Path, tmp_path: Path) -> None:
    assert run("inspect", str(small), hide=("torch", "matplotlib")).returncode == 0
    message = one_sentence(
        run("inspect", str(small), "--plot", str(tmp_path / "p.png"), hide=("matplotlib",))
    )
    assert "pip install 'pagedkv[cli]'" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{folder}/none.npz"], "{folder}/none.npz: expected a readable file, got No such file or directory"),
        (["{folder}/text.npz"], "{folder}/text.npz: expected a snapshot of pagedkv, got File is not a zip"),
        (["{small}", "--width", "39"], "--width: expected an integer from 40 to 1000, got 39"),
        (["{small}", "--plot", "{folder}/no/p.png"], "--plot: expected a file in a folder that exists"),
        (["{small}", "--plot", "{folder}"], "--plot: expected a file in a folder that exists"),
    ],
)
def test_what_is_wrong_is_one_sentence(
    small: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    (tmp_path / "text.npz").write_text("no snapshot")
    result = run("inspect", *(each.format(folder=tmp_path, small=small) for each in arguments))
    assert one_sentence(result).startswith(f"pagedkv: {message.format(folder=tmp_path)}")
