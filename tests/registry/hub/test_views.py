"""The files of a state, and what their revision covers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast import Registry, Run
from holdfast.registry.errors import IncompatibleState, InvalidInput, Thinned
from holdfast.registry.hub.views import View, view_of
from holdfast.registry.loading import Stored
from holdfast.registry.objects import RecentChunks
from tests.registry.hub.conftest import OPTIONS, folder_of_model
from tests.support.stores import new_backend, opened

pytestmark = pytest.mark.xdist_group("hub")


@pytest.fixture
def reg() -> Iterator[Registry]:
    with opened(new_backend()) as found:
        yield found


@pytest.fixture
def run(reg: Registry) -> Run:
    return reg.create_run("r")


def view(stored: Stored, **options: Any) -> View:
    return view_of(stored, replace(OPTIONS, **options), RecentChunks(2**20))


def text(found: View, name: str) -> bytes:
    return found.files[name].read(0, found.files[name].size)


def arrays(*names: str) -> dict[str, Any]:
    return {name: np.arange(6, dtype=np.float32) for name in names}


CONFIGS = {"configs": {"config.json": {"model_type": "none"}}, "metadata": {"format": "pt"}}


def test_values_that_are_no_tensors_are_named_in_the_card(run: Run, tmp_path: Path) -> None:
    odd = {"scale": 3, "inner": arrays("w"), "big": b"x" * 4000, "z": np.zeros(2, np.complex128)}
    made = view(run.save({"model": {**arrays("a", "tied"), **odd}, "optimizer": {"lr": 1}}, step=1))
    assert [*made.files] == ["README.md", "model.safetensors"]
    (tmp_path / "x.safetensors").write_bytes(text(made, "model.safetensors"))
    found = holdfast.formats.read(tmp_path / "x.safetensors", portable=True).state
    assert [*found["model"]] == ["a", "tied"]
    card = text(made, "README.md").decode()
    for name in ("model/scale", "model/inner", "model/big", "model/z", "optimizer"):
        assert name in card


@pytest.mark.parametrize(
    ("odd", "files"),
    [
        ({"json": [1, 2]}, []),
        ({"json": {3: {}, "a.json": {}}}, ["a.json"]),
        ({"metadata": {"model.safetensors": 3}}, []),
        ({"json": {}, "files": {"a.txt": 10**15}}, "not the bytes of a file"),  # of zeros
        ({"json": {}, "files": {"a.txt": "text"}}, "not the bytes of a file"),
        ({"json": {}, "files": {3: b"x", "a.txt": b"y"}}, ["a.txt"]),
        ({"configs": [1]}, "not the name of a configuration"),
        ({"configs": {1: {}}}, "not the name of a configuration"),
        ({"configs": {"config.json": np.arange(3)}}, "a value is not JSON"),
    ],
)
def test_components_that_only_have_the_names_of_a_folder_s(
    run: Run, odd: dict[str, Any], files: list[str] | str
) -> None:
    saved = run.save({"model": arrays("w"), **odd}, step=1)
    if isinstance(files, str):
        with pytest.raises(IncompatibleState, match=files):
            view(saved)
        return
    made = view(saved)
    assert [*made.files] == ["README.md", *files, "model.safetensors"]
    assert text(made, "model.safetensors").endswith(arrays("w")["w"].tobytes())


def test_the_one_component_of_tensors_is_the_model(run: Run) -> None:
    one = view(run.save({"params": arrays("w"), "step": 3}, step=1))
    two = view(run.save({"actor": arrays("w"), "critic": arrays("w")}, step=2))
    assert [*one.files] == ["README.md", "model.safetensors"]
    assert [*two.files] == ["README.md"]
    assert "actor, critic" in text(two, "README.md").decode()


def test_one_id_has_a_revision_for_each_set_of_files(run: Run) -> None:
    saved = run.save({"model": arrays("w"), **CONFIGS}, step=1)
    parts = [*saved.components]
    release = run.releases.publish("1.0.0", saved, card={"license": "mit"}, only=parts)
    assert release.digest == saved.digest
    first = [view(saved), view(release), view(saved, artifacts=("x",))]
    assert "license: mit" in text(first[1], "README.md").decode()
    state: Any = {"file": {"name": "tokenizer.json", "bytes": np.frombuffer(b"{}", np.uint8)}}
    run.pins.artifacts.set("x", state)
    saved = run.history.checkpoint(saved.handle.n)
    with_artifact = view(saved, artifacts=("x",))
    assert text(with_artifact, "tokenizer.json") == b"{}"
    assert first[0].revision == first[2].revision == view(saved).revision
    found = [first[0], first[1], with_artifact, view(saved, shard_bytes=1)]
    assert len({one.revision for one in found[:3]}) == 3
    assert found[3].revision == found[0].revision  # one tensor: one file
    assert {one.revision[:24] for one in found} == {saved.digest.hex()[:24]}
    # Of the same sizes: only the bytes of a card, or the id of an artifact, tell them apart.
    again = run.releases.publish("1.0.1", saved, card={"license": "bsd"}, only=parts)
    state["file"]["bytes"] = np.frombuffer(b"[]", np.uint8)
    run.pins.artifacts.set("y", state)
    other = view(run.history.checkpoint(saved.handle.n), artifacts=("y",))
    assert len({first[1].revision, view(again).revision}) == 2
    assert len({with_artifact.revision, other.revision}) == 2


def test_a_release_of_weights_has_the_configurations_of_its_checkpoint(run: Run) -> None:
    saved = run.save({"model": arrays("w"), **CONFIGS}, step=1)
    run.save({"model": arrays("v"), **CONFIGS}, step=2)
    run.releases.publish("1.0.0", saved, only=["model"])
    assert "config.json" in view(run.releases.get("1.0.0")).files
    run.retention.evict(saved, reason="room")
    assert "config.json" not in view(run.releases.get("1.0.0")).files


def test_names_that_are_one_file_on_some_disks_are_refused(run: Run, tmp_path: Path) -> None:
    folder = folder_of_model(tmp_path / "model")
    (folder / "Config.json").write_text("{}")
    saved = run.save(holdfast.formats.read(folder, format="hf").state, step=1)
    with pytest.raises(InvalidInput, match=r"'Config\.json' and 'config\.json'"):
        view(saved)


def test_weights_that_were_given_up_are_an_error(run: Run) -> None:
    saved = run.save({"model": arrays("w"), "optimizer": arrays("m")}, step=1)
    run.save({"model": arrays("v"), "optimizer": arrays("m")}, step=2)
    run.retention.thin(saved, keep=["optimizer"])
    with pytest.raises(Thinned):
        view(run.history.checkpoint(saved.handle.n))


def test_nothing_that_could_run_is_offered(run: Run, tmp_path: Path) -> None:
    folder = folder_of_model(tmp_path / "model")
    for name in ("pytorch_model.bin", "x.pt", "x.pkl", "x.py", "x.so", "x.json.py", ".json.sh"):
        (folder / name).write_bytes(b"\x80\x04.")
    for step, form in enumerate(("hf", "tree"), start=1):
        made = view(run.save(holdfast.formats.read(folder, format=form).state, step=step))
        assert [*made.files] == ["README.md", "config.json", "model.safetensors", "tokenizer.json"]
        assert "pytorch_model.bin" in text(made, "README.md").decode()
