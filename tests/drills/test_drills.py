"""The drills of docs/operations.md: what is lost, what remains, and how it comes back."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.registry.errors import IntegrityError

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "operations.md"


def state(run: str, step: int) -> dict[str, np.ndarray]:
    return {"w": np.random.default_rng([len(run), *run.encode(), step]).random(3000)}


@pytest.fixture
def heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state folder of this user, which remembers heads."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("HOLDFAST_HEADS", raising=False)
    return tmp_path / "state"


@pytest.fixture
def places(tmp_path: Path, heads: Path) -> tuple[Path, Path]:
    """A registry of two runs with three checkpoints each, and its mirror."""
    home, mirror = tmp_path / "home", tmp_path / "mirror"
    holdfast.init(mirror, skip_race_probe=True).close()
    with holdfast.init(home, skip_race_probe=True) as reg:
        for name in ("r1", "r2"):
            run = reg.create_run(name)
            for step in (1, 2, 3):
                run.save(state(name, step), step=step)
        holdfast.sync(reg, mirror)
    return home, mirror


def check(place: object, *runs: str) -> None:
    """Check every checkpoint of runs against what was saved."""
    with holdfast.open(place, read_only=True) as reg:  # type: ignore[arg-type]
        for name in runs:
            found = {one.step: one for one in reg.run(name).checkpoints()}
            assert list(found) == [1, 2, 3]
            for step, one in found.items():
                assert np.array_equal(one.load()["w"], state(name, step)["w"])


def test_every_snapshot_and_the_state_of_the_machine_may_go(
    places: tuple[Path, Path], heads: Path
) -> None:
    home, _ = places
    with holdfast.open(home) as reg:
        run = reg.run("r1")
        first, _, last = run.checkpoints()
        for n in range(70):  # a snapshot is written every 64 slots
            run.pins.tags.set("keeper", (first, last)[n % 2])
    snapshots = list(home.glob("runs/*/snapshots/*"))
    assert snapshots
    shutil.rmtree(heads)
    for one in snapshots:
        one.unlink()
    check(home, "r1", "r2")


def test_a_lost_slot_stops_its_run_alone_and_the_mirror_has_it(
    places: tuple[Path, Path],
) -> None:
    home, mirror = places
    sorted((home / "runs/r1/log").iterdir())[2].unlink()
    with holdfast.open(home) as reg:
        report = reg.verify()
        assert {one.severity for one in report.findings} >= {"error"}
        assert all("r1" in one.where for one in report.findings if one.severity == "error")
        with pytest.raises(IntegrityError):
            reg.run("r1").latest()
        with pytest.raises(IntegrityError):
            reg.gc(grace_s=0)
    check(home, "r2")
    check(mirror, "r1", "r2")


def test_all_packs_come_back_from_a_mirror(places: tuple[Path, Path]) -> None:
    home, mirror = places
    shutil.rmtree(home / "packs")
    with holdfast.open(home) as reg:
        assert not reg.verify().ok
        with pytest.raises(IntegrityError):
            reg.checkpoint("r1/latest").load()
    assert holdfast.repair(home, mirror).ok
    check(home, "r1", "r2")


def test_a_lost_run_comes_back_from_a_mirror(places: tuple[Path, Path]) -> None:
    home, mirror = places
    with holdfast.open(home) as reg:
        reg.gc(grace_s=0)  # from now on collections know the run
    shutil.rmtree(home / "runs/r1")
    with holdfast.open(home) as reg, pytest.raises(IntegrityError):
        reg.run("r1")
    holdfast.trust(home)
    holdfast.sync(mirror, home)
    check(home, "r1", "r2")
    with holdfast.open(home) as reg:
        with pytest.raises(IntegrityError, match="gc --accept 'r1'"):
            reg.gc(grace_s=0)
        reg.gc(grace_s=0, accept=["r1"])
        assert reg.verify(deep=True).ok
        reg.run("r1").save(state("r1", 4), step=4)


def test_a_mirror_is_promoted_when_the_region_is_gone(places: tuple[Path, Path]) -> None:
    home, mirror = places
    shutil.rmtree(home)
    with holdfast.open(mirror) as reg:
        run = reg.run("r1")
        restored = run.restore()
        assert restored is not None
        assert restored.checkpoint.step == 3
        run.save(state("r1", 4), step=4)
        assert run.latest().step == 4
        assert reg.verify(deep=True).ok


def test_a_versioned_bucket_goes_back_to_a_moment(
    heads: Path, s3_url: Callable[..., str] | str
) -> None:
    import boto3

    url = s3_url if isinstance(s3_url, str) else s3_url()
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    client = boto3.session.Session().client("s3")
    client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    with holdfast.init(url, skip_race_probe=True) as reg:
        for name in ("r1", "r2"):
            run = reg.create_run(name)
            for step in (1, 2, 3):
                run.save(state(name, step), step=step)

    def versions() -> list[dict[str, object]]:
        pages = client.get_paginator("list_object_versions").paginate(Bucket=bucket, Prefix=prefix)
        return [
            {"marker": kind == "DeleteMarkers", **one}
            for page in pages
            for kind in ("Versions", "DeleteMarkers")
            for one in page.get(kind, ())
        ]

    kept = {one["VersionId"] for one in versions()}
    for one in versions():
        client.delete_object(Bucket=bucket, Key=one["Key"])
    with pytest.raises(holdfast.RegistryError):
        holdfast.open(url)
    for one in versions():  # whatever came after the moment
        if one["VersionId"] not in kept:
            client.delete_object(Bucket=bucket, Key=one["Key"], VersionId=one["VersionId"])
    client.close()
    holdfast.trust(url)
    check(url, "r1", "r2")


def test_each_drill_of_the_page_has_a_test_that_exists() -> None:
    section = PAGE.read_text().partition("\n## Drills\n")[2]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 9
    for row in rows:
        named = re.fullmatch(r".*\]\(\.\./(tests/[\w/]+\.py)\) `(test_\w+)` \|", row)
        assert named, row
        assert f"\ndef {named[2]}(" in (ROOT / named[1]).read_text(), row


def test_each_alarm_is_explained() -> None:
    section = PAGE.read_text().partition("\n## What each alarm means\n")[2].partition("\n## ")[0]
    rules = (ROOT / "examples/night/alarms.yaml").read_text()
    alarms = re.findall(r"- alert: (\w+)", rules)
    assert set(re.findall(r"`(Holdfast\w+)`", section)) == set(alarms)
