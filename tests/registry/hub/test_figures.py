"""Figures of the endpoint: seconds of `from_pretrained`, beside plain files of the same model."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

import holdfast
from holdfast.registry.adapters.transformers import model_parts
from holdfast.registry.ui import serving
from tests.registry.hub.conftest import served

pytestmark = pytest.mark.xdist_group("hub")
ROUNDS = 5
#: Loads a model, and prints for how long and what came.
_CLIENT = """
import hashlib, time, transformers
transformers.logging.set_verbosity_error()
from transformers import AutoModelForCausalLM
begin = time.perf_counter()
model = AutoModelForCausalLM.from_pretrained("r", dtype="auto")
took_s = time.perf_counter() - begin
digest = hashlib.sha256()
for name, one in sorted(model.state_dict().items()):
    digest.update(name.encode() + one.untyped_storage().nbytes().to_bytes(8, "big"))
    digest.update(one.flatten()[:: max(1, one.numel() // 1000)].float().numpy())
print(took_s, digest.hexdigest())
"""


@contextmanager
def plain(folder: Path) -> Iterator[int]:
    """Serve a folder by the `FileResponse` of Starlette, as a client of Hugging Face asks."""
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import FileResponse, JSONResponse, Response
    from starlette.routing import Route

    sha = "0" * 40

    async def info(_: Request) -> Response:
        names = [{"rfilename": path.name} for path in folder.iterdir()]
        return JSONResponse({"id": "r", "sha": sha, "siblings": names})

    async def file(request: Request) -> Response:
        path = folder / request.path_params["name"]
        about = {"x-repo-commit": sha}
        if not path.is_file():
            return Response(status_code=404, headers={**about, "x-error-code": "EntryNotFound"})
        tag = hashlib.sha256(path.name.encode()).hexdigest()[:20]
        size = str(path.stat().st_size)
        about |= {"etag": f'"{tag}"', "x-linked-etag": f'"{tag}"', "x-linked-size": size}
        return FileResponse(path, headers=about)

    routes = [
        Route("/api/models/r", info),
        Route("/api/models/r/revision/{revision}", info),
        Route("/r/resolve/{revision}/{name}", file, methods=["GET", "HEAD"]),
    ]
    listener = serving.Listener("127.0.0.1", 0)
    app: Any = Starlette(routes=routes)
    thread = threading.Thread(target=lambda: listener.serve(app, log_level="critical"), daemon=True)
    thread.start()
    try:
        yield listener.port
    finally:
        listener.stop()
        thread.join(60)


@pytest.mark.soak
def test_the_figures_of_a_model_by_the_endpoint_and_by_plain_files(tmp_path: Path) -> None:
    """1 GB of bf16, on one host; the client's cache is empty each time."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    sizes = {"hidden_size": 2048, "intermediate_size": 5504, "num_hidden_layers": 8}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 32_000}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).bfloat16()
    model.save_pretrained(tmp_path / "plain", max_shard_size="5GB")
    with holdfast.init(tmp_path / "reg", skip_race_probe=True) as reg, reg.create_run("r") as run:
        run.save(model_parts(model), step=1)
    size = (tmp_path / "plain/model.safetensors").stat().st_size

    def load(port: int) -> tuple[float, str]:
        cache = tmp_path / "cache"
        told = {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": str(cache)}
        told |= {"HF_TOKEN": "hf_own", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        ended = subprocess.run(
            [sys.executable, "-c", _CLIENT], env={**os.environ, **told}, check=True,
            capture_output=True, text=True,
        )  # fmt: skip
        shutil.rmtree(cache)
        took_s, digest = ended.stdout.split()
        return float(took_s), digest

    ratios, all_s, digests = [], dict[str, list[float]](), set[str]()
    with served(tmp_path / "reg") as site, plain(tmp_path / "plain") as port:
        begin = time.perf_counter()
        assert site.ask("/r/resolve/latest/model.safetensors", "HEAD").status == 307
        head_s = time.perf_counter() - begin
        for turn in range(ROUNDS + 1):
            ports = [("endpoint", site.port), ("plain", port)]
            took_s = {}
            for name, one in ports if turn % 2 else reversed(ports):
                took_s[name], digest = load(one)
                digests.add(digest)
            if turn:  # the first one warms the disk's cache for both
                ratios.append(took_s["endpoint"] / took_s["plain"])
                for name, seconds in took_s.items():
                    all_s.setdefault(name, []).append(seconds)
    about = {name: [round(one, 2) for one in some] for name, some in all_s.items()}
    shown = ", ".join(f"{one:.2f}" for one in ratios)
    print(f"{size / 1e9:.2f} GB; the first HEAD {head_s:.2f} s; seconds {json.dumps(about)}")
    print(f"endpoint / plain: median {median(ratios):.2f} of {shown}")
    assert len(digests) == 1
