"""The unmodified clients: what they read, and what they ask for."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import holdfast
from holdfast.registry.ui import serving
from tests.registry.hub.conftest import OPTIONS, Site, folder_of_model, on_a_weary_s3, served

pytestmark = pytest.mark.xdist_group("hub")
#: The requests that the clients were seen to make; a version with others needs a look.
KNOWN = {
    "GET /api/agent-harnesses",
    "GET /api/models/REPO",
    "GET /api/models/REPO/revision/REVISION",
    "GET /api/models/REPO/tree/REVISION expand recursive",
    "GET /api/models/REPO/tree/REVISION/additional_chat_templates expand recursive",
    "POST /api/models/REPO/paths-info/REVISION",
    "HEAD /REPO/resolve/REVISION/FILE",
    "GET /REPO/resolve/REVISION/FILE",
    "GET /REPO/resolve/REVISION/FILE range",
}


def environment(folder: Path, port: int) -> dict[str, str]:
    # The user's own token, which every client sends to every endpoint.
    own = {
        "HF_TOKEN": "hf_own",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HOME": str(folder / "home"),
    }
    return {**os.environ, **own, "HF_ENDPOINT": f"http://127.0.0.1:{port}"}


def check(site: Site) -> None:
    assert site.asked <= KNOWN
    wrong = ("hf_own", " 500 ", " 503 ", "broken off")
    assert not [line for line in site.lines if any(text in line for text in wrong)]


@pytest.mark.parametrize("where", ["folder", "s3"])
def test_the_clients_of_the_hub_read_files(
    models: Path, tmp_path: Path, request: pytest.FixtureRequest, where: str
) -> None:
    pytest.importorskip("huggingface_hub")
    program = [sys.executable, "-m", "tests.registry.hub.hub_client"]
    with served(models if where == "folder" else on_a_weary_s3(request, models)) as site:
        ended = subprocess.run(
            [*program, tmp_path, models.with_name("model1")],
            env=environment(tmp_path, site.port), capture_output=True, text=True,
        )  # fmt: skip
    assert ended.stdout == "done\n", ended.stderr
    check(site)
    assert len(site.asked) >= len(KNOWN) - 2


@pytest.mark.soak  # the libraries take 5 s of a core to import
@pytest.mark.parametrize("where", ["folder", "s3"])
def test_models_tokenizers_and_adapters_load_by_their_own_libraries(
    tmp_path: Path, request: pytest.FixtureRequest, where: str
) -> None:
    for name in ("peft", "tokenizers", "torch", "transformers"):
        pytest.importorskip(name)
    listener = serving.Listener("127.0.0.1", 0)
    with subprocess.Popen(
        [sys.executable, "-m", "tests.registry.hub.model_client", str(tmp_path)],
        env=environment(tmp_path, listener.port), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    ) as child:  # fmt: skip
        assert child.stdout is not None
        if child.stdout.readline() != "ready\n":
            pytest.fail(child.communicate()[1])
        options = replace(OPTIONS, shard_bytes=8000)  # so that the models come in shards
        reg = tmp_path / "reg"
        place = reg if where == "folder" else on_a_weary_s3(request, reg)
        with served(place, options=options, listener=listener) as site:
            said, errors = child.communicate("served\n", timeout=240)
    assert said == "done\n", errors
    check(site)


def test_a_second_reader_fetches_nothing_from_the_bucket(
    moto_url: Callable[[], str], tmp_path: Path
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    url, folder = moto_url(), folder_of_model(tmp_path / "model")
    with holdfast.init(url, skip_race_probe=True) as reg, reg.create_run("r") as run:
        run.save(holdfast.formats.read(folder, format="tree").state, step=1)
    cache = str(tmp_path / "chunks")
    with served(url, cache=cache) as site:
        for name in ("one", "two"):
            with site.source.meter.measure() as usage:
                got = hub.snapshot_download(
                    "r", endpoint=site.url, revision="latest", cache_dir=tmp_path / name
                )
            for file in ("model.safetensors", "config.json", "tokenizer.json"):
                assert Path(got, file).read_bytes() == (folder / file).read_bytes()
            assert not Path(got, "run.py").exists()
    assert usage.read_bytes < 1000  # of the second: the log alone
