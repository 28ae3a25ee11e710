"""One stored state: what is said of it, and what that reads."""

from __future__ import annotations

import shlex
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import holdfast
from holdfast import Monitor, Registry
from holdfast.backends.memory import MemoryBackend
from holdfast.registry.cli.app import app
from holdfast.registry.errors import Damaged
from holdfast.registry.store.address import Address
from holdfast.registry.ui.pages import contents as contents_query
from holdfast.registry.ui.pages.checkpoint import VIEW, sharing, state_view, statistics
from holdfast.registry.ui.pages.view import Asked
from holdfast.registry.ui.source import Source
from tests.registry.ui.sources import source_of
from tests.support.faults import flip
from tests.support.stores import contents


def weights(seed: int, n: int = 1000) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=n).astype(np.float32)


@pytest.fixture
def saved(reg: Registry):
    run = reg.create_run(
        "r", seed=7, config={"lr": 0.1}, monitor=Monitor(metric="loss", mode="min")
    )
    for step in (1, 2, 3):
        state = {"model": {"a": weights(0), "b": weights(step)}, "optimizer": {"m": weights(9)}}
        run.save(state, step=step, metrics={"loss": 1 / step}, meta={"note": "<b>"})
    run.pins.gates.set("done", run.latest())
    return run


def test_a_checkpoint_is_described_without_reading_a_tensor(saved, backend: MemoryBackend) -> None:
    with source_of(backend) as source:
        source.run("r")
        with source.meter.measure() as used:
            found = state_view(source, "r/main/step3")
        assert used.calls == {"get": 2}  # a look whether the run has grown, and the manifest
    assert (found.kind, found.record.step, found.troubles) == ("checkpoint", 3, ())
    assert found.names == ("latest", "best", "gates/done")
    assert [(part.name, part.tensors, part.nbytes) for part in found.contents.components] == [
        ("model", 2, 8000),
        ("optimizer", 1, 4000),
    ]
    assert [one.path for one in found.contents.tensors] == ["model/a", "model/b", "optimizer/m"]
    assert found.previous == "r/main/step00000002"
    assert found.meta == {"note": "<b>"}
    assert found.provenance.config == {"lr": 0.1}
    assert found.provenance.seed == "0x0000000000000007"


def test_small_tensors_are_shown_together(saved, backend, monkeypatch) -> None:
    monkeypatch.setattr(contents_query, "TENSORS_SHOWN", 2)
    with source_of(backend) as source:
        found = state_view(source, "r/latest").contents
    assert len(found.tensors) == 2
    assert sum(part.others for part in found.components) == 1
    assert sum(part.other_bytes for part in found.components) == 4000


def test_what_is_shared_comes_from_the_chunks(saved, backend) -> None:
    with source_of(backend) as source:
        source.run("r")
        with source.meter.measure() as used:
            found = sharing(source, "r/main/step2", neighbours=1)
        assert used.calls == {"get": 3}  # a look, and two manifests
        assert len(found.others) == 1
        assert found.not_compared == 1
        found = sharing(source, "r/main/step2")
    assert [(one.ref, one.shared_bytes, one.components) for one in found.others] == [
        ("r/main/step00000001", 8000, ("optimizer",)),
        ("r/main/step00000003", 8000, ("optimizer",)),
    ]
    assert found.size_bytes == 12000


def test_statistics_stop_at_the_budget(saved, backend) -> None:
    with source_of(backend) as source:
        found = statistics(source, "r/latest", budget_bytes=9000)
        assert [one.path for one in found.tensors] == ["model/a", "model/b"]
        assert (found.read_bytes, found.left, found.left_bytes) == (8000, 1, 4000)
        assert statistics(source, "r/latest").left == 0


def test_the_histogram_is_of_the_tensor_that_the_url_names(saved, backend) -> None:
    with source_of(backend) as source:
        known, unknown = (
            VIEW.ask(source, Asked(path={"ref": "r/latest"}, query={"tensor": [path]}))
            for path in ("model/b", "model/c")
        )
    assert sum(known.body.histogram.counts) == 1000
    assert known.troubles == ()
    assert unknown.body.histogram is None
    assert "model/c" in unknown.troubles[0].what


def test_damage_of_the_manifest_hides_nothing_else(saved, backend) -> None:
    (key, *_) = [
        key for key in contents(backend, "manifests/") if saved.latest().digest.hex() in key
    ]
    flip(backend, key)
    with source_of(backend) as source:
        found = state_view(source, "r/latest")
        assert found.contents is None
        assert found.names == ("latest", "best", "gates/done")
        assert key in found.troubles[0].what
        with pytest.raises(Damaged):
            statistics(source, "r/latest")
        # A neighbour that is damaged does not hide the others.
        near = sharing(source, "r/main/step2").others
        assert [one.damage is None for one in near] == [True, False]


def test_other_states_are_shown_too(saved, reg, backend) -> None:
    saved.releases.publish("1.0.0", saved.latest(), card={"about": "<script>"})
    saved.save({"model": {"a": weights(1)}}, step=4, companions={"frozen": {"w": weights(5)}})
    with source_of(backend) as source:
        release = state_view(source, "r/releases/1.0.0")
        assert (release.kind, release.record) == ("release", None)
        assert release.made_from == "r/main/step00000003"
        assert release.metrics == saved.releases.get("1.0.0").metrics
        assert release.card == "about: <script>\n"
        assert sharing(source, "r/releases/1.0.0").others[0].ref == "r/main/step00000001"
        whole = state_view(source, "r/main/step4")
        assert list(whole.companions) == ["frozen"]
        companion = state_view(source, whole.companions["frozen"].ref)
        assert companion.kind == "companion"


@pytest.mark.parametrize("tensor", [np.arange(20.0), torch.arange(20.0)], ids=["numpy", "torch"])
def test_the_snippets_run_as_they_are(tmp_path: Path, monkeypatch, tensor) -> None:
    url = tmp_path / "a registry's"
    with holdfast.init(url, skip_race_probe=True) as made:
        made.create_run("r").save({"w": tensor}, step=5)
    monkeypatch.chdir(tmp_path)
    with closing(Source.open(Address(url))) as source:
        found = state_view(source, "r/latest")
    names: dict[str, Any] = {}
    exec(found.load, names)
    assert names["state"]["w"].sum() == 190
    command, *rest = shlex.split(found.pull.replace("\\\n", ""))
    assert command == "holdfast"
    done = CliRunner().invoke(app, rest)
    assert done.exit_code == 0, done.output
    assert len(list(tmp_path.glob("r-main-step00000005.*"))) == 1
