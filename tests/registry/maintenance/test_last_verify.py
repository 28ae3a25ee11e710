"""The last verification of a registry, as this machine remembers it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.registry.maintenance.last_verify import last_verify
from holdfast.registry.storage.heads import folder, memory


@pytest.fixture
def place(tmp_path: Path) -> Path:
    with holdfast.init(tmp_path / "reg", skip_race_probe=True) as reg:
        reg.create_run("r").save({"w": np.arange(1000.0)}, step=1)
    return tmp_path / "reg"


def test_the_last_one_is_kept_with_its_depth_and_findings(place: Path) -> None:
    with holdfast.open(place) as reg:
        assert last_verify(reg.store) is None
        reg.verify()
        found = last_verify(reg.store)
        assert (found.depth, found.errors, found.checkpoints) == ("structure", 0, 1)
        reg.verify(deep=True)
    (pack,) = (one for one in (place / "packs").rglob("*.0"))
    pack.write_bytes(pack.read_bytes()[:-1])
    with holdfast.open(place) as again:
        assert last_verify(again.store).depth == "deep"
        again.verify(sample=1)
        assert last_verify(again.store).errors == 1
        assert last_verify(again.store).findings[0].where.startswith("packs/")


def test_it_belongs_to_one_registry_and_goes_with_its_heads(place: Path) -> None:
    with holdfast.open(place) as reg:
        reg.verify()
    assert holdfast.trust(place)
    with holdfast.open(place) as reg:
        assert last_verify(reg.store) is None
        reg.store.heads.keep(".verified", b"nonsense\n")
        assert last_verify(reg.store) is None


def test_what_cannot_be_kept_stops_nothing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(folder, "replace", full)
    with holdfast.open(place) as reg:
        assert reg.verify().ok
        assert last_verify(reg.store) is None
    monkeypatch.setenv(memory.MEMORY, "0")
    with holdfast.open(place) as reg:
        assert reg.verify().ok
        assert last_verify(reg.store) is None
