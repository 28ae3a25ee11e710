"""One state has one id and one manifest in every store, and a sync copies commits byte for byte."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast import Storing
from tests.support.stores import commit_lines

#: The URL of each store, and the transport of its bytes.
STORES: dict[str, tuple[str, str | None]] = {
    "memory": ("memory", None),
    "s3 by boto3, moto": ("moto_url", "boto3"),
    "s3 by s3fs, moto": ("moto_url", "s3fs"),
    "s3 by boto3, radosgw": ("radosgw_url", "boto3"),
    "s3 by s3fs, radosgw": ("radosgw_url", "s3fs"),
    "s3 by obstore, radosgw": ("radosgw_url", "obstore"),
    "azure": ("azure_url", None),
    "google": ("gs_url", None),
}
STATE = {
    "model": {"w": np.arange(300_000, dtype="f4").reshape(300, 1000), "b": np.ones(7, "f2")},
    "step": 2**70,
    "rng": [1, 2.5, None, "text", b"bytes", True],
}


@pytest.fixture(params=list(STORES))
def place(request: pytest.FixtureRequest) -> Mapping[str, Any]:
    """A fresh place in a store, as `holdfast.open` takes it."""
    name, transport = STORES[request.param]
    if transport in ("obstore", "s3fs"):
        pytest.importorskip(transport)
    if name == "memory":
        return {"url": f"memory://{secrets.token_hex(8)}"}
    found: str | Callable[[], str] = request.getfixturevalue(name)
    return {"url": found if isinstance(found, str) else found(), "transport": transport}


def objects(registry: holdfast.Registry, folder: str) -> dict[str, bytes]:
    """Return objects by name, without the generation of the writer."""
    backend = registry.handle.store.backend
    return {
        info.key.rpartition(".")[0]: backend.get(info.key) for info in backend.list(f"{folder}/")
    }


def test_a_state_is_the_same_everywhere(place: Mapping[str, Any], tmp_path: Path) -> None:
    with (
        holdfast.init(tmp_path / "r", skip_race_probe=True) as here,
        holdfast.init(**place, skip_race_probe=True) as there,
    ):
        saved = [
            one.create_run("own", seed=1).save(STATE, step=3, storing=Storing(compression="zstd"))
            for one in (here, there)
        ]
        assert saved[0].digest == saved[1].digest
        assert saved[0].handle.record.manifest == saved[1].handle.record.manifest
        for folder in ("manifests", "packs"):
            assert len(objects(here, folder)) == 1
            assert objects(here, folder) == objects(there, folder)


def test_synced_commits_are_the_same_everywhere(place: Mapping[str, Any], tmp_path: Path) -> None:
    back = tmp_path / "back"
    holdfast.init(back, skip_race_probe=True).close()
    with (
        holdfast.init(tmp_path / "r", skip_race_probe=True) as here,
        holdfast.init(**place, skip_race_probe=True) as there,
        holdfast.open(back) as again,
    ):
        run = here.create_run("run", seed=1)
        for step in range(3):
            run.save({**STATE, "n": step}, step=step, metrics={"loss": 1 / (step + 1)})
        run.pins.tags.set("kept", run.latest())
        holdfast.sync(here, there)
        assert len(commit_lines(here.handle.store.backend, "run")) >= 4
        assert commit_lines(there.handle.store.backend, "run") == commit_lines(
            here.handle.store.backend, "run"
        )
        holdfast.sync(there, again)
        assert commit_lines(again.handle.store.backend, "run") == commit_lines(
            here.handle.store.backend, "run"
        )
        assert again.verify(deep=True).ok
