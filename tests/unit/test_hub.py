"""A model's name on the Hub becomes a folder here, or one clear sentence about why not."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pagedkv.errors import BackendUnavailableError, UsageError
from pagedkv.runner.hub import find_model, is_hub_name

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{ }",
    "model.safetensors": bytes(range(200)),
    "pytorch_model.bin": b"pickled",
    "consolidated.safetensors": b"the same again",
    "original/params.json": b"[]",
}
REPOSITORIES = {"org/model": FILES, "org/only-gguf": {"small.gguf": b"GGUF", "README.md": b"#"}}


class Hub(BaseHTTPRequestHandler):
    """As much of the Hub as its client asks for."""

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self, *, with_body: bool) -> None:
        parts = self.path.partition("?")[0].strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            self._describe("/".join(parts[2:4]), parts[4:])
            return
        repo, file = "/".join(parts[:2]), parts[4:]  # org/model/resolve/revision/file
        body = REPOSITORIES.get(repo, {}).get("/".join(file))
        if body is None:
            code = "RepoNotFound" if repo not in REPOSITORIES else "EntryNotFound"
            self._send(404, b"", {"X-Error-Code": code})
            return
        headers = {"ETag": f'"{hashlib.sha256(body).hexdigest()}"', "X-Repo-Commit": COMMIT}
        self._send(200, body, headers, with_body=with_body)

    def _describe(self, repo: str, rest: list[str]) -> None:
        if repo not in REPOSITORIES:
            self._send(401, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif rest[:1] == ["revision"] and rest[1] not in ("main", COMMIT):
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif rest[:1] == ["tree"]:
            tree = [
                {"type": "file", "path": name, "size": len(body), "oid": hashlib.sha1(body).hexdigest()}
                for name, body in REPOSITORIES[repo].items()
            ]
            self._send(200, json.dumps(tree).encode(), {})
        else:
            siblings = [{"rfilename": name} for name in REPOSITORIES[repo]]
            body = {"_id": "1", "id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings, "tags": []}
            self._send(200, json.dumps(body).encode(), {})

    def _send(self, status: int, body: bytes, headers: dict[str, str], *, with_body: bool = True) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def found(names: list[tuple[str, str | None]], endpoint: str, home: Path) -> list[str]:
    """What `find_model` says of each name, in a process of its own: the client reads its settings once."""
    pytest.importorskip("huggingface_hub")
    program = (
        "import json, sys\n"
        "from pagedkv.errors import PagedKVError\n"
        "from pagedkv.runner.hub import find_model\n"
        "for name, revision in json.loads(sys.argv[1]):\n"
        "    try: print(find_model(name, revision=revision))\n"
        "    except PagedKVError as error: print(type(error).__name__, error)\n"
    )
    variables = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": ""}
    result = subprocess.run(
        [sys.executable, "-c", program, json.dumps(names)],
        capture_output=True, text=True, timeout=120, env={**os.environ, **variables},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_model_is_downloaded_once_and_then_found_without_a_network(endpoint: str, tmp_path: Path) -> None:
    folder, file, none, no_revision, no_config = found(
        [
            ("org/model", None), ("org/only-gguf/small.gguf", None), ("org/none", None),
            ("org/model", "v9"), ("org/only-gguf", None),
        ],
        endpoint, tmp_path,
    )  # fmt: skip
    names = {path.name: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}
    wanted = ("config.json", "tokenizer.json", "model.safetensors")
    assert names == {name: FILES[name] for name in wanted}
    assert Path(file).read_bytes() == b"GGUF"
    assert none.startswith("UsageError model 'org/none': expected a model on http")
    assert no_revision.startswith(
        "UsageError model 'org/model', revision 'v9': expected a branch, tag or commit"
    )
    assert "(org/only-gguf/FILE.gguf), got a repository without config.json" in no_config
    # Port 9 discards; nothing listens there.
    again, missing = found([("org/model", None), ("org/other", None)], "http://127.0.0.1:9", tmp_path)
    assert again == folder
    assert missing.startswith(
        "UsageError model 'org/other': expected a file or folder of that name, a copy in"
    )
    assert "hf download org/other --local-dir FOLDER" in missing


def test_without_huggingface_hub_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(BackendUnavailableError, match=r"pip install 'pagedkv\[hub\]'"):
        find_model("org/model")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("org/model", True),
        ("org/model-1.5_b/sub/file.gguf", True),
        ("./org/model", False),
        ("../model", False),
        ("/org/model", False),
        ("model", False),
        ("folder/file.gguf", False),
        ("a/b/c", False),
        ("org/here", False),
    ],
)
def test_what_is_here_or_looks_like_a_path_is_no_name(
    name: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org" / "here").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert is_hub_name(name) is expected
    if not expected:
        assert find_model(name) == Path(name)


def test_revision_of_a_path_is_refused() -> None:
    with pytest.raises(UsageError, match="revision: expected one only with the name of a model on the Hub"):
        find_model("./folder", revision="main")
