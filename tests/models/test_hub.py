"""Models of the hub: fetched once a node, then read from its cache. A small server of this machine stands for the hub."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from podium.config import ModelConfig
from podium.models import load_model, load_tokenizer, save_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SMALL = ModelConfig(path="char_llama", override_config={"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1})
FETCH = """
from podium.config import ModelConfig
from podium.models import fetch_model
fetch_model(ModelConfig(path="owner/name"))
"""
LOAD = """
from podium.config import ModelConfig
from podium.models import load_model, load_tokenizer
config = ModelConfig(path="owner/name")
print(sum(weight.numel() for weight in load_model(config, seed=0).parameters()), len(load_tokenizer(config)))
"""


class Hub:
    """Serves one folder as `owner/name`, and counts what it was asked."""

    def __init__(self, folder: Path) -> None:
        self.asked: Counter[str] = Counter()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.answer(has_body=False)

            def do_GET(self) -> None:
                self.answer(has_body=True)

            def answer(self, *, has_body: bool) -> None:
                name = self.path.partition("?")[0].rpartition("/")[2]
                hub.asked[f"{self.command} {name}"] += 1
                file = folder / name
                is_there = "/resolve/" in self.path and file.is_file()
                content = file.read_bytes() if is_there else b"{}"
                self.send_response(200 if is_there else 404)
                self.send_header("Content-Length", str(len(content)))
                self.send_header("X-Repo-Commit", COMMIT)
                if is_there:
                    self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
                else:
                    self.send_header("X-Error-Code", "EntryNotFound")
                self.end_headers()
                if has_body:
                    self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        Thread(target=self.server.serve_forever, daemon=True).start()

    def python(self, code: str, cache: Path) -> str:
        """What the code prints on a node with that cache."""
        host = f"http://127.0.0.1:{self.server.server_address[1]}"
        off = {"HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1"}
        env = {**os.environ, **off, "HF_ENDPOINT": host, "HF_HOME": str(cache), "no_proxy": "127.0.0.1"}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout.strip()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    folder = tmp_path / "hub"
    save_model(load_model(SMALL, seed=0), str(folder))
    load_tokenizer(SMALL).save_pretrained(folder)
    served = Hub(folder)
    yield served
    served.server.shutdown()


@pytest.mark.slow  # three processes that import transformers
def test_a_model_is_fetched_once_a_node_and_its_ranks_do_not_ask_the_hub(hub: Hub, tmp_path: Path):
    """1,024 ranks asked the hub for every file at the same moment."""
    cache = tmp_path / "cache"
    hub.python(FETCH, cache)
    assert hub.asked["GET model.safetensors"] == 1
    before = hub.asked.copy()
    parameters, tokens = map(int, hub.python(LOAD, cache).split())
    assert hub.asked == before
    assert parameters == sum(weight.numel() for weight in load_model(SMALL, seed=0).parameters())
    assert tokens == len(load_tokenizer(SMALL))
    (cache / "hub" / "models--owner--name" / "snapshots" / COMMIT / "model.safetensors").unlink()
    hub.python(LOAD, cache)
    assert hub.asked != before  # what is not whole is asked for, as ever
