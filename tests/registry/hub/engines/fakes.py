"""Fakes of SGLang and vLLM as programs: servers that load a folder when they are told, and hash it.

    python fakes.py sglang|vllm PORT LOG [MODEL]

They answer as the sources of SGLang 0.5.23 and vLLM 0.33 do. Each load adds a line of JSON to LOG:
the id that it was told, and the SHA-256 of all tensors, read file by file, with pauses. `vllm`
answers a path that it has read before from its memory, as vllm#32718 says of vLLM.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

PAUSE_S = 0.002  # between two files


def hash_of(folder: str) -> str:
    """Return the digest of all tensors of a folder: their names and bytes in order of the names."""
    found: dict[str, bytes] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        for name, one in json.loads(data[8 : 8 + size]).items():
            if name != "__metadata__":
                begin, end = one["data_offsets"]
                found[name] = data[8 + size + begin : 8 + size + end]
        time.sleep(PAUSE_S)
    return tensors_hash(found)


def tensors_hash(tensors: dict[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode() + b"\0" + hashlib.sha256(tensors[name]).digest())
    return digest.hexdigest()


class Fake(BaseHTTPRequestHandler):
    """One request; the engine is the server."""

    server: Engine
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers.get("content-length", 0)))
        self._answer(json.loads(data) if data else None)

    def _answer(self, body: Any) -> None:
        engine, path = self.server, urlsplit(self.path)
        engine.asked.append((self.path, body, dict(self.headers)))
        try:
            status, answer = engine.act(path.path, path.query, body)
        except OSError as error:  # such as a folder that is gone
            status, answer = engine.failed(error)
        data = b"" if answer is None else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class Engine(ThreadingHTTPServer):
    """What both engines have."""

    daemon_threads = True

    def __init__(self, port: int, log: str | os.PathLike[str], model: str | None = None) -> None:
        super().__init__(("127.0.0.1", port), Fake)
        self.log = Path(log)
        self.asked: list[tuple[str, Any, dict[str, str]]] = []
        self.version, self.hash, self.paused = "default", "", False
        self.running = 0  # requests that were aborted or waited for are counted by their tests
        if model is not None and Path(model).exists():
            self.hash = hash_of(model)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def note(self) -> None:
        line = {"version": self.version, "hash": self.hash, "at": time.time()}
        with self.log.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def failed(self, error: OSError) -> tuple[int, Any]:
        return 500, {"error": str(error)}

    def act(self, path: str, query: str, body: Any) -> tuple[int, Any]:
        raise NotImplementedError


class SGLang(Engine):
    def act(self, path: str, query: str, body: Any) -> tuple[int, Any]:
        match path:
            case "/pause_generation":
                self.paused = True
                return 200, {"message": "Generation paused successfully.", "status": "ok"}
            case "/continue_generation":
                self.paused = False
                return 200, {"message": "Generation continued successfully.", "status": "ok"}
            case "/update_weights_from_disk":
                self.hash = hash_of(body["model_path"])  # raises before anything changes
                self.version = body.get("weight_version") or self.version
                self.note()
                return 200, {"success": True, "message": "Succeeded.", "num_paused_requests": 0}
            case "/model_info":
                return 200, {"model_path": "x", "weight_version": self.version}
        return 404, {"detail": "Not Found"}

    def failed(self, error: OSError) -> tuple[int, Any]:
        return 400, {"success": False, "message": str(error), "num_paused_requests": 0}


class VLLM(Engine):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.read: dict[str, str] = {}

    def act(self, path: str, query: str, body: Any) -> tuple[int, Any]:
        match path:
            case "/pause":
                self.paused = True
                return 200, {"status": "paused"}
            case "/resume":
                self.paused = False
                return 200, {"status": "resumed"}
            case "/collective_rpc":
                assert body["method"] == "reload_weights"
                folder = body["kwargs"]["weights_path"]
                if folder not in self.read:
                    self.read[folder] = hash_of(folder)
                self.hash = self.read[folder]
                return 200, {"results": [None]}
            case "/reset_prefix_cache":
                return 200, None
            case "/update_weight_version":
                self.version = body["new_version"]
                self.note()
                return 200, {"success": True, "new_version": self.version}
            case "/weight_info":
                return 200, {"weight_version": self.version}
        return 404, {"detail": "Not Found"}


KINDS = {"sglang": SGLang, "vllm": VLLM}

if __name__ == "__main__":
    kind, port, log, *model = sys.argv[1:]
    KINDS[kind](int(port), log, *model).serve_forever()
