"""The data of a registry: each pack once, a share of them, and on from where it broke off."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from holdfast.backends import Backend
from holdfast.backends.wrappers import Metered
from holdfast.registry.errors import InvalidInput
from holdfast.registry.face.factory import open_on
from holdfast.registry.objects.placement import Rows
from tests.support.faults import Hooked, flip
from tests.support.stores import bytes_in, contents, small_grid

PACKS = 40


@pytest.fixture
def many(run, backend) -> Iterator[list[str]]:
    """A checkpoint of forty packs of equal size."""
    with small_grid(512, pack_bytes=512):
        value = np.frombuffer(np.random.default_rng(0).bytes(512 * PACKS), np.uint8)
        run.save({"model": {"w": value}}, step=1)
        found = sorted(contents(backend, "packs/"))
        assert len(found) == PACKS
        yield found


def verify(backend: Backend, **options):
    """Verify with a handle that remembers nothing; return the report and the packs read whole."""
    calls: list = []
    with open_on(Metered(backend, calls)) as registry:
        report = registry.verify(**options)
    gets = [call for call in calls if call.method == "get" and call.byte_range is None]
    return report, sorted(call.key for call in gets if call.key.startswith("packs/"))


class _Stop(BaseException):
    """Ctrl-C."""


def interrupted(backend: Backend, after: int, of: str = "packs/", **options) -> None:
    """Verify, and be interrupted after some packs, or other objects."""
    hooked, count = Hooked(backend), itertools.count(1)

    def look(method: str, key: str) -> None:
        if method == "get" and key.startswith(of) and next(count) > after:
            raise _Stop

    hooked.before = look
    with open_on(hooked) as registry, pytest.raises(_Stop):
        registry.verify(**options)


def test_without_anything_no_pack_is_read(many, backend):
    report, read = verify(backend)
    assert read == []
    assert report.data is None


def test_deep_reads_each_once(many, backend):
    report, read = verify(backend, deep=True)
    assert read == many
    data = report.data
    assert (data.packs, data.packs_read, data.packs_noted) == (PACKS, PACKS, 0)
    assert data.bytes_read == data.pack_bytes == bytes_in(backend, "packs/")


# Samples


@pytest.mark.parametrize(("share", "count"), [(0.05, 2), (0.5, 20), (1.0, PACKS), (1e-9, 1)])
def test_a_sample_reads_the_share(many, backend, share, count):
    report, read = verify(backend, sample=share)
    # Tables differ by a few bytes, and so do packs.
    assert abs(len(read) - count) <= 1
    data = report.data
    assert (data.packs, data.packs_read) == (PACKS, len(read))
    assert data.bytes_read == sum(len(backend.get(key)) for key in read)
    assert report.ok


def test_a_sample_is_drawn_anew_each_time(many, backend):
    drawn = {tuple(verify(backend, sample=0.25)[1]) for _ in range(6)}
    assert len(drawn) > 1


def test_a_sample_finds_what_it_reads(many, backend):
    for key in many:
        flip(backend, key, 9)
    report, read = verify(backend, sample=0.1)
    assert sorted(f.where for f in report.findings) == sorted(set(read))


def test_a_sample_of_everything_checks_rows_as_well(many, backend):
    assert verify(backend, sample=1.0)[0].ok


@pytest.mark.parametrize("share", [0, -0.1, 1.01, float("nan")])
def test_what_is_no_share_is_refused(many, backend, share):
    with pytest.raises(InvalidInput, match="share"):
        verify(backend, sample=share)


def test_an_empty_registry_has_nothing_to_draw_from(backend):
    report, read = verify(backend, sample=0.5)
    assert (report.ok, read, report.data.packs) == (True, [], 0)


# Going on


def test_an_interrupted_verification_reads_only_the_rest(many, backend, tmp_path):
    notes = tmp_path / "notes"
    interrupted(backend, 15, deep=True, resume=notes)
    noted = notes.read_bytes().count(b"packs/")
    # Reads behind the interrupted one may have ended before it; they are not noted.
    assert 0 < noted <= 15
    report, read = verify(backend, deep=True, resume=notes)
    assert len(read) == PACKS - noted
    assert (report.data.packs_read, report.data.packs_noted) == (PACKS - noted, noted)
    assert report.data.bytes_read + report.data.bytes_noted == report.data.pack_bytes
    assert report.ok
    assert not notes.exists()


def test_what_stops_the_check_of_the_structure_costs_no_reading(many, backend, tmp_path):
    notes = tmp_path / "notes"
    interrupted(backend, 0, of="placements/", deep=True, resume=notes)
    report, read = verify(backend, deep=True, resume=notes)
    assert (read, report.data.packs_noted, report.ok) == ([], PACKS, True)
    assert not notes.exists()


def test_interrupted_again_and_again_it_ends(many, backend, tmp_path):
    notes = tmp_path / "notes"
    noted = [0]
    for _ in range(3):
        interrupted(backend, 8, resume=notes)
        noted.append(notes.read_bytes().count(b"packs/"))
    report, read = verify(backend, resume=notes)
    assert noted == sorted(set(noted)), "each try adds to the notes"
    assert report.data.packs_noted == noted[-1] <= 3 * 8
    assert len(read) == PACKS - noted[-1]


def test_without_an_interruption_no_file_is_left(many, backend, tmp_path):
    _, read = verify(backend, resume=tmp_path / "notes")
    assert read == many
    assert not (tmp_path / "notes").exists()


def test_damage_is_never_noted(many, backend, tmp_path):
    for key in many[:5]:
        flip(backend, key, 9)
    notes = tmp_path / "notes"
    interrupted(backend, PACKS - 1, resume=notes)
    report, read = verify(backend, resume=notes)
    assert set(many[:5]) <= set(read)
    assert [f.where for f in report.findings] == many[:5]


def test_what_was_written_since_is_read_again(many, backend, tmp_path):
    notes = tmp_path / "notes"
    interrupted(backend, PACKS - 1, resume=notes)
    noted = next(key for key in many if key.encode() in notes.read_bytes())
    flip(backend, noted, 9)
    report, read = verify(backend, resume=notes)
    assert noted in read
    assert [f.where for f in report.findings] == [noted]


def test_rows_are_checked_also_for_what_was_read_before(run, reg, backend, tmp_path):
    """The tables of packs that are noted are fetched: a placement must fit them all the same."""
    from dataclasses import replace

    from holdfast.registry.history.log import RunLog

    with small_grid(64):
        value = np.frombuffer(np.random.default_rng(0).bytes(640), np.uint8)
        checkpoint = run.save({"m": {"w": value}}, step=1)
        run.save({"m": {"w": value[::-1].copy()}}, step=2)
        notes = tmp_path / "notes"
        interrupted(backend, 1, resume=notes)
        old = checkpoint.handle.reader.placement
        forged = replace(old, rows=Rows([*old.rows[:-1], old.rows[-1]._replace(offset=0)]))
        name = forged.digest.hex()
        backend.put(f"placements/{name[:2]}/{name}.0", forged.encode())
        log = RunLog(reg.handle.store, "run")
        log.open()
        log.append(lambda state: [checkpoint.handle.reader.place.changed(placement=forged.digest)])
        report, read = verify(backend, resume=notes)
        assert len(read) == 1
        assert [f.kind for f in report.findings if f.severity == "error"] == ["placement"]


def test_samples_with_one_file_come_to_everything(many, backend, tmp_path):
    notes = tmp_path / "notes"
    seen: list[str] = []
    calls = 0
    while not calls or notes.exists():
        report, read = verify(backend, sample=0.3, resume=notes)
        assert not set(read) & set(seen)
        seen += read
        calls += 1
    assert sorted(seen) == many
    assert calls == 4
    assert report.ok


def test_notes_that_are_too_old_are_told(many, backend, tmp_path, monkeypatch):
    from holdfast.registry.upkeep import data_pass as module

    notes = tmp_path / "notes"
    interrupted(backend, 15, resume=notes)
    now = module.time.time()
    monkeypatch.setattr(module.time, "time", lambda: now + 31 * 86_400)
    report, read = verify(backend, resume=notes)
    assert read == many
    assert [(f.kind, f.severity) for f in report.findings] == [("resume", "note")]
    assert "31 days ago" in report.findings[0].message


def test_a_foreign_file_is_refused_before_anything_is_read(many, backend, tmp_path):
    notes = Path(tmp_path / "notes")
    notes.write_text("my thesis\n")
    metered = Metered(backend)
    with open_on(metered) as registry:
        before = metered.snapshot()
        with pytest.raises(InvalidInput, match="not notes of a verification"):
            registry.verify(resume=notes)
        assert metered.snapshot().since(before).requests == 0
    assert notes.read_text() == "my thesis\n"
