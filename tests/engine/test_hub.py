"""Asking the hub: one question, a short wait, and a plain answer where there is no network or no model."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from jfbatch.engine import hub
from jfbatch.engine.hub import hub_answers
from jfbatch.engine.tokenizer import load_tokenizer
from jfbatch.errors import ModelError

ANSWERS: dict[str, tuple[int, dict[str, str]]] = {
    "here/model": (200, {}),
    "gated/model": (403, {"X-Error-Code": "GatedRepo"}),
    "broken/hub": (503, {}),
}


class Hub(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        name = self.path.removeprefix("/api/models/").split("?")[0]
        status, headers = ANSWERS.get(name, (404, {"X-Error-Code": "RepoNotFound"}))
        body = f'{{"id": "{name}", "_id": "1"}}'.encode()
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return tmp_path


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with HTTPServer(("127.0.0.1", 0), Hub) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{listening.server_port}")
        yield
        listening.shutdown()


def put_in_cache(cache: Path, name: str) -> None:
    folder = cache / f"models--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "snapshots" / "abc" / "config.json").write_text("{}")


@pytest.mark.usefixtures("server")
def test_what_the_hub_says_of_a_model() -> None:
    assert hub_answers("here/model")
    with pytest.raises(ModelError, match=r"^no/model: there is no such model at http://127.*HF_TOKEN"):
        hub_answers("no/model")
    with pytest.raises(ModelError, match="gated/model: is gated: ask for access"):
        hub_answers("gated/model")
    with pytest.raises(ModelError, match=r"broken/hub: .* does not answer"):
        hub_answers("broken/hub")


@pytest.mark.parametrize("kind", ["refusing", "silent"])
def test_without_a_network_the_answer_comes_soon_and_a_copy_is_used(
    kind: str, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hub, "PATIENCE", 0.3)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if kind == "silent":
            listener.listen()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{listener.getsockname()[1]}")
        started = time.monotonic()
        with pytest.raises(ModelError, match=r"does not answer .*; name a directory") as caught:
            hub_answers("some/model")
        assert time.monotonic() - started < 3 and "\n" not in str(caught.value)
        put_in_cache(cache, "some/model")
        with caplog.at_level(logging.WARNING):
            assert not hub_answers("some/model")
        assert "the copy in its cache is used" in caplog.text


@pytest.mark.parametrize("name", ["a--b/c", "foo..bar", "a/b.", "a" * 97])
def test_what_no_model_can_be_called_is_told(name: str) -> None:
    with pytest.raises(ModelError, match="no name that the hub allows"):
        hub_answers(name)


@pytest.mark.usefixtures("server")
def test_a_tokenizer_alone_is_asked_for_once_as_well(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"^no/model: there is no such model"):
        load_tokenizer("no/model", tmp_path)


def test_offline_nobody_is_asked(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE"):
        hub_answers("some/model")
    put_in_cache(cache, "some/model")
    assert not hub_answers("some/model")
