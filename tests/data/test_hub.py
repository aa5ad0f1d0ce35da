"""Hub ids against a server on this machine that answers as the hub does, and without one."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from lean_trl.data.hub import cache_folder, resolve_dataset, resolve_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "datasets/someone/rows": {
        "data/train-00000-of-00001.jsonl": b'{"text": "a"}\n',
        "README.md": b"# rows\n",
    },
    "someone/model": {
        "config.json": b"{}",
        "tokenizer.json": b"{}",
        "model.safetensors": b"weights",
        "pytorch_model.bin": b"pickle",
    },
}


class Hub(BaseHTTPRequestHandler):
    """The few addresses that a snapshot download asks for."""

    def do_GET(self) -> None:
        path = self.path.removeprefix("/").split("?")[0]
        for repo, files in FILES.items():
            api = f"api/{repo if repo.startswith('datasets/') else 'models/' + repo}"
            if path in (f"{api}/revision/main", f"{api}/revision/{COMMIT}", f"{api}/revision/v1"):
                listed = [{"rfilename": name} for name in files]
                info = {"id": repo.removeprefix("datasets/"), "sha": COMMIT, "siblings": listed}
                return self._answer(json.dumps(info).encode(), "application/json")
            if path == f"{api}/tree/{COMMIT}":
                tree = [
                    {"type": "file", "path": name, "size": len(body), "oid": "0" * 40}
                    for name, body in files.items()
                ]
                return self._answer(json.dumps(tree).encode(), "application/json")
            prefix = f"{repo}/resolve/{COMMIT}/"
            if path.startswith(prefix) and path.removeprefix(prefix) in files:
                return self._answer(files[path.removeprefix(prefix)], "application/octet-stream")
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()
        return None

    do_HEAD = do_GET

    def _answer(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hash(body) & 0xFFFFFFFF:08x}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from huggingface_hub import constants

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        address + "/{repo_id}/resolve/{revision}/{filename}",
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", address)
    yield
    server.shutdown()


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("revision", [None, "v1"])
def test_a_dataset_by_its_id(revision: str | None) -> None:
    from lean_trl.data.rows import find_files, read_rows

    folder = resolve_dataset("someone/rows", revision)
    (file,) = find_files(folder, "train")
    assert list(read_rows(file)) == [{"text": "a"}] and COMMIT in str(folder)
    assert not (folder / "README.md").exists()  # rows alone are fetched


@pytest.mark.usefixtures("hub")
def test_a_model_by_its_id() -> None:
    without = resolve_model("someone/model", weights=False)
    assert {f.name for f in without.iterdir()} == {"config.json", "tokenizer.json"}
    whole = resolve_model("someone/model")
    assert {f.name for f in whole.iterdir()} == {
        "config.json",
        "tokenizer.json",
        "model.safetensors",
    }


@pytest.mark.usefixtures("hub")
def test_an_id_that_the_hub_does_not_know() -> None:
    with pytest.raises(
        ValueError, match="someone/else: no such file or folder here, and the hub refuses"
    ):
        resolve_dataset("someone/else")


def test_no_hub_and_nothing_in_its_cache() -> None:
    with pytest.raises(ValueError, match="cannot be reached"):
        resolve_model("someone/model")
    with pytest.raises(ValueError, match="no valid hub id"):
        resolve_dataset("./no/such/folder/at all.jsonl")


def test_prepared_rows_lie_beside_the_hubs_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "lean_trl"  # where the built-in rows are too
    assert cache_folder("~/x") == Path.home() / "x"


def test_local_paths_are_taken_as_they_are(tmp_path: Path) -> None:
    assert resolve_model(tmp_path) == tmp_path and resolve_dataset(str(tmp_path)) == tmp_path
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is a file"):
        resolve_model(tmp_path / "file")
