"""The last verification of a registry, as this machine remembers it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.registry.store.heads import folder, memory
from holdfast.registry.upkeep.verify_notes import Damage, known_damage, last_verify


@pytest.fixture
def place(tmp_path: Path) -> Path:
    with holdfast.init(tmp_path / "reg", skip_race_probe=True) as reg:
        reg.create_run("r").save({"w": np.arange(1000.0)}, step=1)
    return tmp_path / "reg"


def test_the_last_one_is_kept_with_its_depth_and_findings(place: Path) -> None:
    with holdfast.open(place) as reg:
        assert last_verify(reg.handle.store) is None
        reg.verify()
        found = last_verify(reg.handle.store)
        assert (found.depth, found.errors, found.checkpoints) == ("structure", 0, 1)
        reg.verify(deep=True)
    (pack,) = (one for one in (place / "packs").rglob("*.0"))
    pack.write_bytes(pack.read_bytes()[:-1])
    with holdfast.open(place) as again:
        assert last_verify(again.handle.store).depth == "deep"
        again.verify(sample=1)
        assert last_verify(again.handle.store).errors == 1
        assert last_verify(again.handle.store).findings[0].where.startswith("packs/")


def test_damage_stays_known_until_a_check_that_looks_for_it_passes(place: Path) -> None:
    with holdfast.open(place) as reg:
        reg.run("r").save({"w": np.arange(9000.0)}, step=2)
        reg.create_run("other").save({"w": np.zeros(1000)}, step=7)
        kept = reg.run("r").checkpoints()
    packs = sorted(place.rglob("packs/*/*.0"), key=lambda one: one.stat().st_size)
    whole = packs[-1].read_bytes()
    packs[-1].write_bytes(bytes([whole[0] ^ 1]) + whole[1:])  # its size is right

    def known(**asked: object) -> list[tuple[str, ...]]:
        with holdfast.open(place) as reg:
            reg.verify(**asked)
            damage = Damage.of(reg.handle.store)
            assert damage.marks("r", kept[0].handle.newest_record()) == []
            assert bool(damage.marks("r", kept[1].handle.newest_record())) == bool(
                damage.in_run("r")
            )
            assert not damage.in_run("other")
            return [one.affects for one in last_verify(reg.handle.store).damage]

    assert known() == []
    assert known(deep=True) == [("r/main/step00000002",)]
    assert known() == [("r/main/step00000002",)]  # names and sizes say nothing of its bytes
    with holdfast.open(place) as reg:
        report = reg.verify()
        assert report.ok
        assert [one.needs for one in report.standing] == ["deep"]
        assert set(last_verify(reg.handle.store).depths) == {"structure", "deep"}
    packs[-1].write_bytes(whole)
    assert known() != []
    assert known(decode=True) == []
    packs[-1].write_bytes(whole[:-1])  # its size tells: the structure shows it, and its end
    assert known() != []
    packs[-1].write_bytes(whole)
    assert known() == []


def test_a_sample_clears_only_what_it_read_and_a_repair_what_it_mended(
    place: Path, tmp_path: Path
) -> None:
    with holdfast.open(place) as reg:
        reg.run("r").save({"w": np.arange(90_000.0)}, step=2)
    holdfast.init(tmp_path / "mirror", skip_race_probe=True).close()
    holdfast.sync(place, tmp_path / "mirror")
    small, large = sorted(place.rglob("packs/*/*.0"), key=lambda one: one.stat().st_size)
    for pack in (small, large):
        pack.write_bytes(pack.read_bytes()[:-1] + b"x")
    with holdfast.open(place) as reg:
        assert len([one for one in reg.verify(deep=True).findings if one.affects]) == 2
        assert (
            len(reg.verify(sample=1e-9).standing) == 1
        )  # one pack was read, and the other was not
        assert len(known_damage(reg.handle.store)) == 2
        assert holdfast.repair(reg, tmp_path / "mirror", dry_run=True).left == ()
        assert len(known_damage(reg.handle.store)) == 2
        holdfast.repair(reg, tmp_path / "mirror")
        assert known_damage(reg.handle.store) == []


def test_it_belongs_to_one_registry_and_goes_with_its_heads(place: Path) -> None:
    with holdfast.open(place) as reg:
        reg.verify()
    assert holdfast.trust(place)
    with holdfast.open(place) as reg:
        assert last_verify(reg.handle.store) is None
        reg.handle.store.heads.keep(".verified", b"nonsense\n")
        assert last_verify(reg.handle.store) is None


def test_what_cannot_be_kept_stops_nothing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(folder, "replace", full)
    with holdfast.open(place) as reg:
        assert reg.verify().ok
        assert last_verify(reg.handle.store) is None
    monkeypatch.setenv(memory.MEMORY, "0")
    with holdfast.open(place) as reg:
        assert reg.verify().ok
        assert last_verify(reg.handle.store) is None
