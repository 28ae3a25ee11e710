"""Verify: whatever is wrong is found, named, and says which checkpoints it costs."""

from __future__ import annotations

import pytest

from registry.actions import Place
from registry.epochs import encode_sweep, encode_upgrade
from registry.errors import IntegrityError
from registry.framing import join_lines, split_lines
from registry.keys import epoch_key, slot_key, snapshot_key
from registry.log import REPLAY_VERSION, RunLog
from tests.registry.conftest import (
    contents,
    flip,
    objects,
    packs_of,
    same,
    small_grid,
    small_state,
)


@pytest.fixture
def two(run):
    return [run.save(small_state(i), step=i) for i in (1, 2)]


@pytest.fixture
def check(backend, open_registry):
    def verify(*, deep=True):
        return open_registry(backend).verify(deep=deep)

    return verify


def test_a_sound_registry_is_sound(two, check, backend):
    backend.put(epoch_key(1), encode_sweep(1, []))
    for deep in (False, True):
        report = check(deep=deep)
        assert (report.ok, report.findings) == (True, ())
        assert (report.runs, report.checkpoints) == (1, 2)
        assert report.objects == len(objects(backend))


def test_deep_reads_every_byte_of_every_object_once(two, check, backend):
    everything = contents(backend)
    skipped = len(everything["registry.json"])
    assert check().bytes_checked == sum(map(len, everything.values())) - skipped


def test_shallow_reads_no_pack(two, check, backend):
    from backends.wrappers import Metered
    from registry.registry import open_on

    calls = []
    with open_on(Metered(backend, calls)) as registry:
        assert registry.verify().ok
    assert not [call for call in calls if call.method == "get" and call.key.startswith("packs/")]


def test_progress_grows_to_all_bytes(two, reg):
    seen = []
    report = reg.verify(deep=True, progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == report.bytes_checked


def test_every_flipped_bit_of_every_file_is_found(two, reg, backend):
    for key, data in contents(backend).items():
        for bit in (3, len(data) * 4 + 1, len(data) * 8 - 5):
            flip(backend, key, bit)
            report = reg.verify(deep=True)
            assert not report.ok, (key, bit)
            assert any(key in f"{f.where} {f.message}" for f in report.findings), (key, bit)
            backend.put(key, data)
    assert reg.verify(deep=True).ok


@pytest.mark.parametrize("kind", ["packs", "manifests", "placements"])
@pytest.mark.parametrize("deep", [False, True])
def test_an_object_that_is_gone_is_found_without_reading_and_says_what_it_costs(
    two, check, backend, kind, deep
):
    first = set(packs_of(two[0]))
    key = next(k for k in sorted(objects(backend)) if k.startswith(kind) and k not in first)
    backend.delete(key)
    report = check(deep=deep)
    (finding,) = report.findings
    assert not report.ok
    assert (finding.kind, finding.where) == ("missing", key)
    affected = [c for c in two if any(c.digest.short in ref for ref in finding.affects)]
    assert len(affected) == len(finding.affects) == 1
    assert "mirror" in finding.advice


@pytest.mark.parametrize("change", [lambda d: d[:-1], lambda d: d + b"x"])
def test_a_pack_of_another_size_is_found_without_reading(two, check, backend, change):
    key = packs_of(two[0])[0]
    size = len(backend.get(key))
    backend.put(key, change(backend.get(key)))
    (finding,) = check(deep=False).findings
    assert (finding.kind, finding.where) == ("pack", key)
    assert f"expected {size} bytes; found {len(backend.get(key))}" in finding.message


def test_a_shared_pack_names_every_checkpoint_that_needs_it(run, backend, check):
    made = [run.save({"same": small_state(0)["model"], "n": i}, step=i) for i in range(3)]
    (key,) = packs_of(made[0])
    flip(backend, key, 9)
    (finding,) = check().findings
    assert [ref.split("/")[1] for ref in finding.affects] == [c.digest.short for c in made]


def test_what_nothing_needs_is_a_note(two, check, backend):
    stray = packs_of(two[0])[0]
    stray = stray[:-3] + ("7" if stray[-3] != "7" else "8") + ".0"
    backend.put(stray, b"noise")
    report = check()
    assert report.ok
    (finding,) = report.findings
    assert (finding.where, finding.severity, finding.affects) == (stray, "note", ())


@pytest.mark.parametrize("key", ["notes.txt", "packs/x", "runs/run/notes", "runs/x.txt"])
def test_files_of_others_are_notes(two, check, backend, key):
    backend.put(key, b"x")
    report = check()
    assert report.ok
    assert [(f.kind, f.where, f.severity) for f in report.findings] == [
        ("unknown-file", key, "note")
    ]


@pytest.mark.parametrize("key", ["epochs/x", "runs/run/log/x"])
def test_files_of_others_among_slots_and_epochs_are_found(two, check, backend, key):
    backend.put(key, b"x")
    assert any(f.where == key and f.kind == "unknown-file" for f in check().findings)


def test_a_damaged_snapshot_is_a_note(reg, backend, check):
    run = reg.create_run("run")
    run.save(small_state(), step=1)
    for _ in range(70):
        run.set_status("running")
    flip(backend, snapshot_key("run", 63))
    report = check()
    assert report.ok
    assert [f.kind for f in report.findings] == ["snapshot"]


def test_a_gap_in_a_log_is_found(two, check, backend):
    backend.delete(slot_key("run", 1))
    (finding,) = [f for f in check().findings if f.severity == "error"]
    assert (finding.kind, finding.where) == ("log", "run")
    assert "gap" in finding.message


def test_what_stands_before_a_damaged_slot_is_still_checked(two, check, backend):
    flip(backend, slot_key("run", 2))
    report = check()
    assert report.checkpoints == 1
    (finding,) = [f for f in report.findings if f.kind == "log"]
    assert finding.affects == ("run from slot 2 on",)


def test_a_checkpoint_without_a_place_is_found(two, check, backend, reg):
    from registry.actions import AddCheckpoint
    from registry.digest import Digest
    from registry.log import commit_line

    log = RunLog(reg.store, "run")
    log.open()
    action = AddCheckpoint(manifest=Digest.of(b"?"), phase="main", step=9, size_bytes=0)
    log.append(lambda state: [commit_line(state, [action])])
    (finding,) = check().findings
    assert (finding.kind, finding.severity) == ("missing", "error")
    assert "no place" in finding.message


@pytest.mark.parametrize("entry", [b"x", encode_sweep(2, [])])
def test_a_damaged_epoch_is_found(two, check, backend, entry):
    backend.put(epoch_key(1), entry)
    (finding,) = check().findings
    assert (finding.kind, finding.severity) == ("epoch", "error")


def test_a_damaged_older_epoch_is_found(two, check, backend):
    for epoch in (1, 2):
        backend.put(epoch_key(epoch), encode_sweep(epoch, []))
    flip(backend, epoch_key(1))
    (finding,) = check().findings
    assert finding.kind == "epoch"
    assert epoch_key(1) in finding.message


def test_a_gap_among_epochs_is_found(two, check, backend):
    backend.put(epoch_key(2), encode_sweep(2, []))
    assert [f.kind for f in check().findings] == ["epoch"]


def test_an_upgrade_is_no_damage(two, check, backend):
    backend.put(epoch_key(1), encode_upgrade(1, 2))
    assert check().ok


def _place(checkpoint, reg, **changes) -> None:
    log = RunLog(reg.store, "run")
    log.open()
    moved: Place = checkpoint.place.model_copy(update=changes)
    log.append(lambda state: [moved])


@pytest.mark.parametrize("deep", [False, True])
def test_a_place_that_names_another_manifests_placement_is_found(two, check, reg, deep, backend):
    first, second = two
    _place(first, reg, placement=second.place.placement)
    with pytest.raises(IntegrityError):
        _load(backend, first)
    assert not check(deep=deep).ok


def _load(backend, checkpoint):
    from registry.registry import open_on

    with open_on(backend) as registry:
        return registry.checkpoint(f"run/{checkpoint.digest.hex()}").load()


@pytest.mark.parametrize("what", ["offset", "too few", "too many", "list member"])
def test_a_placement_that_does_not_fit_its_packs_is_found_by_deep(run, reg, backend, check, what):
    from dataclasses import replace

    import numpy as np

    from registry.placement import Placement

    with small_grid(64, list_threshold=4):
        state = {"m": {"w": np.frombuffer(np.random.default_rng(0).bytes(640), np.uint8)}}
        if what != "list member":
            state = {"m": {f"w{i}": state["m"]["w"][:64] + i for i in range(3)}}
            state = {"m": {k: np.concatenate([v, v + 9]) for k, v in state["m"].items()}}
        checkpoint = run.save(state, step=1)
        old = checkpoint.placement
        rows = list(old.rows)
        match what:
            case "too few":
                rows.pop()
            case "too many":
                rows.append(rows[-1])
            case _:
                rows[-1] = replace(rows[-1], offset=rows[-2].offset)
        forged = replace(old, rows=tuple(rows))
        assert isinstance(forged, Placement)
        backend.put(
            f"placements/{forged.digest.hex()[:2]}/{forged.digest.hex()}.0", forged.encode()
        )
        _place(checkpoint, reg, placement=forged.digest)
        with pytest.raises(IntegrityError):
            _load(backend, checkpoint)
        assert not check().ok


def test_verify_changes_nothing(two, check, backend):
    flip(backend, packs_of(two[0])[0])
    before = contents(backend)
    check()
    assert contents(backend) == before


def test_superseded_checkpoints_are_checked_too(run, backend, check):
    first = run.save(small_state(1), step=1)
    second = run.save(small_state(2), step=2)
    run.restore(at=first)
    run.save(small_state(3), step=2)
    flip(backend, packs_of(second)[0], 9)
    report = check()
    assert report.checkpoints == 3
    assert not report.ok


def test_what_verify_calls_sound_can_be_loaded(two, check, backend):
    assert check().ok
    for checkpoint, value in zip(two, (1, 2), strict=True):
        assert same(_load(backend, checkpoint), small_state(value))


# Snapshots


@pytest.fixture
def snapshot(reg, backend, monkeypatch) -> str:
    monkeypatch.setattr("registry.log.SNAPSHOT_EVERY", 2)
    run = reg.create_run("long")
    for step in range(3):
        run.save(small_state(), step=step)
    return next(info.key for info in backend.list("runs/long/snapshots/"))


def _with_header(backend, key: str, header: bytes) -> None:
    _, *rest = split_lines(backend.get(key), where=key)
    backend.put(key, join_lines([header, *rest]))


@pytest.mark.parametrize("replay", [1, REPLAY_VERSION + 1])
def test_a_snapshot_of_another_replay_is_no_finding(reg, backend, snapshot, replay):
    """Whatever it holds: nobody of this version reads it, and another one may."""
    header = b'{"format":"holdfast.snapshot/1","replay":%d,"slot":1}' % replay
    backend.put(snapshot, join_lines([header, b'{"of":"another version"}']))
    assert reg.verify(deep=True).findings == ()


@pytest.mark.parametrize(
    "header",
    [
        b"{}",
        b'"text"',
        b'{"format":"holdfast.epoch/1","replay":1}',
        b'{"format": "holdfast.snapshot/1"}',
        b"\xff",
    ],
)
def test_what_is_no_snapshot_is_a_note(reg, backend, snapshot, header):
    _with_header(backend, snapshot, header)
    report = reg.verify(deep=True)
    assert [(f.kind, f.where, f.severity) for f in report.findings] == [
        ("snapshot", snapshot, "note")
    ]
    assert report.ok
