"""The work of a night: each step, its time, its failures, and the bytes that were read."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import holdfast
from holdfast import Retention
from holdfast.registry.errors import InvalidInput
from holdfast.registry.face import caring
from holdfast.registry.upkeep import data_pass
from tests.registry.upkeep.test_pass_notes import OnFullDisk

NAMES = ["a", "b", "c", "d", "e"]


@pytest.fixture
def reg(tmp_path):
    rng = np.random.default_rng(0)
    with holdfast.init(tmp_path / "registry", skip_race_probe=True) as reg:
        for name in NAMES:
            run = reg.create_run(name, retention=Retention(last=1))
            run.save({"w": rng.standard_normal(5000)}, step=1)
        yield reg


@pytest.fixture
def clock(monkeypatch):
    """Replace the clock of a care by one that moves when it is told to, and by a second a look."""
    now = SimpleNamespace(days=0.0, looks=0)

    def monotonic() -> float:
        now.looks += 1
        return float(now.looks)

    own = SimpleNamespace(time=lambda: time.time() + now.days * 86_400, monotonic=monotonic)
    monkeypatch.setattr(caring, "time", own)
    return now


@pytest.fixture
def read(monkeypatch):
    """Count how often each pack was read and hashed whole."""
    counted, plain = Counter(), data_pass.read_pack

    def counting(store, info):
        counted[info.key] += 1
        return plain(store, info)

    monkeypatch.setattr(data_pass, "read_pack", counting)
    return counted


def by_name(report):
    return {step.name: step for step in report.steps}


def files(folder):
    found = (one for one in folder.rglob("*") if one.is_file())
    return {str(one.relative_to(folder)): one.read_bytes() for one in found}


def test_a_night_does_every_step_and_a_second_one_finds_nothing_to_do(reg, tmp_path):
    mirror = tmp_path / "mirror"
    holdfast.init(mirror, skip_race_probe=True).close()
    first = by_name(holdfast.care(reg, mirrors=[mirror]))
    assert list(first) == ["prune", "gc", "repack", "verify", f"mirror {mirror}"]
    assert {step.state for step in first.values()} == {"done"}
    assert first["prune"].counts["runs"] == len(NAMES)
    assert first[f"mirror {mirror}"].counts["runs"] == len(NAMES)
    holdfast.care(reg, mirrors=[mirror])  # the places that a repack changed
    before = files(tmp_path / "registry"), files(mirror)
    report = holdfast.care(reg, mirrors=[mirror])
    assert report.ok
    assert before == (files(tmp_path / "registry"), files(mirror))


def test_within_the_days_every_byte_is_read(reg, clock, read, tmp_path):
    holdfast.care(reg, read_all_in_days=2.5)
    first = read.total()
    for _ in range(2):
        holdfast.care(reg, read_all_in_days=2.5)
    assert read.total() == first < len(NAMES)  # within the hour no share is due
    for days in 1, 2:
        clock.days = days
        holdfast.care(reg, read_all_in_days=2.5)
    assert set(read) == {key for key in files(tmp_path / "registry") if key.startswith("packs/")}


def test_a_clock_that_was_wrong_once_keeps_nothing_from_being_read(reg, clock, read, tmp_path):
    for days in 1000, 1, 2, 3:
        clock.days = days
        holdfast.care(reg, read_all_in_days=2)
    assert set(read) == {key for key in files(tmp_path / "registry") if key.startswith("packs/")}


@pytest.mark.parametrize(
    "left", [b"", b'{"began_s', b"\0" * 200 + b"\n" * 3], ids=["empty", "torn", "zeros"]
)
def test_notes_of_a_pass_that_were_damaged_are_begun_anew(reg, clock, read, monkeypatch, left):
    assert holdfast.care(reg, read_all_in_days=28).ok
    notes = reg.handle.store.heads.path(".pass")
    assert Path(notes).read_bytes()
    Path(notes).write_bytes(left)
    for clock.days in range(1, 29):
        report = holdfast.care(reg, read_all_in_days=4)
        assert report.ok, report
    assert min(read[one.key] for one in reg.handle.store.backend.list("packs/")) > 1


def test_a_disk_of_this_machine_that_is_full_keeps_no_step_from_its_work(
    reg, tmp_path, monkeypatch
):
    monkeypatch.setattr(data_pass, "Path", OnFullDisk)
    mirror = tmp_path / "mirror"
    holdfast.init(mirror, skip_race_probe=True).close()
    report = holdfast.care(reg, read_all_in_days=2, mirrors=[mirror])
    assert report.ok, report
    assert by_name(report)["verify"].counts["read_bytes"] > 0


def test_damage_is_told_and_the_other_steps_are_done(reg, tmp_path):
    log = tmp_path / "registry" / "runs" / "b" / "log"
    for slot in sorted(log.iterdir()):
        slot.write_bytes(slot.read_bytes().replace(b"action", b"Action"))
    report = holdfast.care(tmp_path / "registry", mirrors=[tmp_path / "nothing"])
    steps = by_name(report)
    assert steps["prune"].counts["runs"] == len(NAMES) - 1
    assert [one.exit_code for one in report.steps] == [6, 6, 6, 6, 4]
    assert report.exit_code == 6
    assert all("runs/b/log" in steps[name].errors[0] for name in ("prune", "gc", "verify"))


def test_damaged_bytes_stay_told_until_they_are_mended(reg, clock, monkeypatch, tmp_path):
    mirror, shown = tmp_path / "mirror", {}
    holdfast.init(mirror, skip_race_probe=True).close()
    holdfast.sync(reg, mirror)
    monkeypatch.setattr(caring.HERE, "put", lambda name, value, **_: shown.update({name: value}))
    pack = next((tmp_path / "registry" / "packs").rglob("*.0"))
    data, times = bytearray(pack.read_bytes()), pack.stat()
    data[len(data) // 2] ^= 1
    pack.write_bytes(data)
    os.utime(pack, ns=(times.st_atime_ns, times.st_mtime_ns))  # so that no listing shows it
    for days in 0, 0, 0.5, 1, 2:  # its share of a night is another pack, or none, most of the time
        clock.days = days
        shown.clear()
        step = by_name(holdfast.care(reg, read_all_in_days=1 if days == 0 else 28))["verify"]
        assert (step.exit_code, len(step.errors)) == (6, 1), days
        assert shown["damaged_findings"] == 1
        assert "verified_timestamp_seconds" not in shown
    holdfast.repair(reg, mirror)
    assert by_name(holdfast.care(reg))["verify"].exit_code == 0
    assert shown["damaged_findings"] == 0
    assert "verified_timestamp_seconds" in shown


def test_when_the_time_is_over_the_next_call_goes_on(reg, clock, monkeypatch):
    pruned = []
    monkeypatch.setattr(caring._Night, "_prune", lambda self, name, counts: pruned.append(name))
    report = holdfast.care(reg, for_s=5)
    assert [one.state for one in report.steps] == ["part", "left", "left", "left"]
    assert report.ok
    assert 0 < len(pruned) < len(NAMES)
    done = len(pruned)
    holdfast.care(reg)
    assert pruned == [*NAMES[:done], *NAMES[done:], *NAMES[:done]]


def test_when_the_requests_are_used_up_the_next_call_goes_on(reg, monkeypatch):
    plain, prune, pruned = reg.handle.store.backend, caring._Night._prune, []

    def noting(self, name, counts):
        pruned.append(name)
        prune(self, name, counts)

    monkeypatch.setattr(caring._Night, "_prune", noting)
    report = holdfast.care(reg, most_requests=12)
    assert [one.state for one in report.steps] == ["part", "left", "left", "left"]
    assert 0 < len(pruned) < len(NAMES)
    assert reg.handle.store.backend is plain
    while len(pruned) < len(NAMES):
        holdfast.care(reg, most_requests=12)
    assert pruned[: len(NAMES)] == NAMES
    assert {one.state for one in holdfast.care(reg, most_requests=10_000).steps} == {"done"}


def test_a_second_care_of_this_machine_ends_at_once(reg):
    with reg.handle.store.heads.alone(".care") as is_alone:
        assert is_alone
        assert holdfast.care(reg).steps == ()
    assert len(holdfast.care(reg).steps) == 4


@pytest.mark.parametrize("given", [{"for_s": 0}, {"most_requests": 0}, {"read_all_in_days": 29}])
def test_a_bound_out_of_range_is_refused(reg, given):
    with pytest.raises(InvalidInput):
        holdfast.care(reg, **given)
