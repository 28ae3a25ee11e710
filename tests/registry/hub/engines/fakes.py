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

import numpy as np

PAUSE_S = 0.002  # between two files


#: Of which tensors of a Llama an engine makes one.
FUSED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
}

Tensors = dict[str, tuple[list[int], bytes]]


def hash_of(folder: str) -> str:
    """Return the digest of all tensors of a folder: their names and bytes in order of the names."""
    return hash_in(tensors_in(folder))


def hash_in(tensors: Tensors) -> str:
    return tensors_hash({name: data for name, (_, data) in tensors.items()})


def tensors_in(folder: str) -> Tensors:
    """Return shapes and bytes of all tensors of a folder."""
    found: Tensors = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        for name, one in json.loads(data[8 : 8 + size]).items():
            if name != "__metadata__":
                begin, end = one["data_offsets"]
                found[name] = one["shape"], data[8 + size + begin : 8 + size + end]
        time.sleep(PAUSE_S)
    return found


def rank_of(tensors: Tensors, part: int, parts: int) -> dict[str, bytes]:
    """Return the tensors of one of the ranks that share a Llama, as its engine keeps them."""
    found: dict[str, bytes] = {}
    order = [*FUSED]
    fused = sorted(filter(is_fused, tensors), key=lambda name: order.index(kind_of(name)))
    for name in [*(name for name in tensors if not is_fused(name)), *fused]:
        kind, (shape, data) = kind_of(name), tensors[name]
        rows = np.frombuffer(data, np.uint8).reshape(shape[0], -1)
        if kind == "embed_tokens":
            rows = np.pad(rows, ((0, -shape[0] % 64), (0, 0)))
        if len(shape) > 1:
            axis = 1 if kind in ("o_proj", "down_proj") else 0
            rows = np.split(rows, parts, axis)[part]
        own = name.replace(kind, FUSED.get(kind, kind))
        found[own] = found.get(own, b"") + rows.tobytes()
    return found


def kind_of(name: str) -> str:
    return f".{name}".split(".")[-2]


def is_fused(name: str) -> bool:
    return kind_of(name) in FUSED


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
        self.ranks, self.has_checker, self.is_gpu = 1, True, False
        self.memory: list[dict[str, bytes]] = []  # by rank
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

    def load(self, tensors: Tensors) -> None:
        self.hash = hash_in(tensors)
        if any(map(is_fused, tensors)):
            self.memory = [rank_of(tensors, part, self.ranks) for part in range(self.ranks)]

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
                self.load(tensors_in(body["model_path"]))  # raises before anything changes
                self.version = body.get("weight_version") or self.version
                self.note()
                return 200, {"success": True, "message": "Succeeded.", "num_paused_requests": 0}
            case "/model_info":
                return 200, {"model_path": "x", "weight_version": self.version}
            case "/weights_checker" if self.has_checker:
                assert body == {"action": "checksum"}
                ranks = [self.digests(*one) for one in enumerate(self.memory)]
                return 200, {"success": True, "message": "Success.", "ranks": ranks}
        return 404, {"detail": "Not Found"}

    def digests(self, part: int, tensors: dict[str, bytes]) -> dict[str, Any]:
        """Return 64 bits of each SHA-256, as it does on a CPU, or a hash that is none."""
        made = hashlib.md5 if self.is_gpu else hashlib.sha256
        found = {name: made(data).hexdigest()[:16] for name, data in tensors.items()}
        about = {"role": "target", "tp_rank": part, "tp_size": self.ranks}
        return {"checksums": found, "parallelism_info": [about]}

    def failed(self, error: OSError) -> tuple[int, Any]:
        return 400, {"success": False, "message": str(error), "num_paused_requests": 0}


class VLLM(Engine):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.read: dict[str, Tensors] = {}

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
                    self.read[folder] = tensors_in(folder)
                self.load(self.read[folder])
                return 200, {"results": [None]}
            case "/reset_prefix_cache":
                return 200, None
            case "/update_weight_version":
                self.version = body["new_version"]
                if not self.version.startswith("loading-"):
                    self.note()
                return 200, {"success": True, "new_version": self.version}
            case "/weight_info":
                return 200, {"weight_version": self.version}
            case "/weight_checker" if self.has_checker:
                assert body == {"action": "checksum"}
                found = {
                    f"dp0:pp0:pcp0:tp{part}:{name}": hashlib.sha256(data).hexdigest()
                    for part, tensors in enumerate(self.memory)
                    for name, data in tensors.items()
                }
                return 200, {"checksums": found}
        return 404, {"detail": "Not Found"}


KINDS = {"sglang": SGLang, "vllm": VLLM}

if __name__ == "__main__":
    kind, port, log, *model = sys.argv[1:]
    KINDS[kind](int(port), log, *model).serve_forever()
