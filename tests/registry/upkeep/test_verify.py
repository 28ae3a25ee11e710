"""Verify: whatever is wrong is found, named, and says which checkpoints it costs."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from holdfast.backends.wrappers import Metered, Wrapper
from holdfast.registry.errors import IntegrityError, StorageError, StoreUnavailable
from holdfast.registry.face.factory import open_on
from holdfast.registry.history.actions import Mark, Place
from holdfast.registry.history.epochs import encode_sweep, encode_upgrade
from holdfast.registry.history.log import RunLog
from holdfast.registry.history.snapshots import PARTED_VERSION
from holdfast.registry.objects import codecs
from holdfast.registry.objects.codecs import CODECS, LZ4, RAW, ZSTD
from holdfast.registry.objects.framing import join_lines, split_lines
from holdfast.registry.objects.keys import (
    ObjectKey,
    epoch_key,
    slot_key,
    snapshot_key,
    snapshot_slot,
)
from holdfast.registry.objects.pack import PackEntry, PackTable, trailer
from holdfast.registry.objects.placement import (
    MAX_DEPTH,
    NO_BASE,
    ChunkRow,
    PackRef,
    Placement,
    Rows,
)
from holdfast.registry.spec import Retention
from holdfast.registry.values.digest import Digest, Digests
from tests.support.faults import Hooked, Once, flip
from tests.support.inline import without_threads
from tests.support.states import same, save_small, small_state
from tests.support.stores import contents, objects, packs_of, small_grid


@pytest.fixture
def two(run):
    return save_small(run, 1, 2)


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
    affected = [c for c in two if any(ref.startswith(c.ref) for ref in finding.affects)]
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
    assert list(finding.affects) == [c.ref for c in made]


def test_what_nothing_needs_is_a_note(two, check, backend):
    stray = packs_of(two[0])[0]
    stray = stray[:-3] + ("7" if stray[-3] != "7" else "8") + ".0"
    backend.put(stray, b"noise")
    report = check()
    assert report.ok
    (finding,) = report.findings
    assert (finding.where, finding.severity, finding.affects) == (stray, "note", ())


@pytest.mark.parametrize("kind", ["manifests", "placements"])
def test_deep_reads_what_nothing_needs_as_well(two, check, backend, run, kind):
    run.retention.drop("not wanted", now=True)
    key = next(key for key in sorted(objects(backend)) if key.startswith(kind))
    flip(backend, key)
    assert check(deep=False).findings == ()
    (finding,) = check().findings
    assert (finding.where, finding.severity, finding.affects) == (key, "note", ())


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
        run.status = "running"
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
    from holdfast.registry.history.actions import AddCheckpoint
    from holdfast.registry.history.authorship import commit_line
    from holdfast.registry.values.digest import Digest

    log = RunLog(reg.handle.store, "run")
    log.open()
    action = AddCheckpoint(manifest=Digest.of(b"?"), phase="main", step=9, size_bytes=0)
    log.append(lambda run: [commit_line(run, [action])])
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
    log = RunLog(reg.handle.store, "run")
    log.open()
    moved: Place = checkpoint.handle.reader.place.changed(**changes)
    log.append(lambda run: [moved])


@pytest.mark.parametrize("deep", [False, True])
def test_a_place_that_names_another_manifests_placement_is_found(two, check, reg, deep, backend):
    first, second = two
    _place(first, reg, placement=second.handle.reader.place.placement)
    with pytest.raises(IntegrityError):
        _load(backend, first)
    assert not check(deep=deep).ok


def _load(backend, checkpoint):
    with open_on(backend) as registry:
        return registry.checkpoint(f"run/{checkpoint.digest.hex()}").load()


@pytest.mark.parametrize("what", ["offset", "too few", "too many", "list member"])
def test_a_placement_that_does_not_fit_its_packs_is_found_by_deep(run, reg, backend, check, what):
    with small_grid(64, list_threshold=4):
        state = {"m": {"w": np.frombuffer(np.random.default_rng(0).bytes(640), np.uint8)}}
        if what != "list member":
            state = {"m": {f"w{i}": state["m"]["w"][:64] + i for i in range(3)}}
            state = {"m": {k: np.concatenate([v, v + 9]) for k, v in state["m"].items()}}
        checkpoint = run.save(state, step=1)
        old = checkpoint.handle.reader.placement
        rows = list(old.rows)
        match what:
            case "too few":
                rows.pop()
            case "too many":
                rows.append(rows[-1])
            case _:
                rows[-1] = rows[-1]._replace(offset=rows[-2].offset)
        forged = replace(old, rows=Rows(rows))
        assert isinstance(forged, Placement)
        backend.put(
            f"placements/{forged.digest.hex()[:2]}/{forged.digest.hex()}.0", forged.encode()
        )
        _place(checkpoint, reg, placement=forged.digest)
        with pytest.raises(IntegrityError):
            _load(backend, checkpoint)
        assert not check().ok


def _forged(checkpoint, reg, entries, *, rows=None) -> None:
    """Place a checkpoint in one pack of these chunks, as anybody with write access could.

    Args:
        checkpoint: The checkpoint.
        reg: Its registry.
        entries: Digest, stored bytes, raw length, codec and base of each chunk; those that the
            manifest has come first.
        rows: What the placement says where it is not the same.
    """
    table, at = [], 0
    for digest, stored, raw_bytes, codec, base in entries:
        name = None if codec == RAW else Digest.of(stored)
        table.append(PackEntry(digest, at, len(stored), raw_bytes, codec, base, name))
        at += len(stored)
    encoded = PackTable(tuple(table)).encode()
    data = b"".join(entry[1] for entry in entries) + encoded + trailer(encoded)
    pack = PackRef(ObjectKey("packs", Digest.of(encoded), 0), len(data))
    reg.handle.store.backend.put(str(pack.key), data)
    digests = [entry.digest for entry in table]
    own = [
        ChunkRow(
            0,
            entry.offset,
            entry.stored_bytes,
            CODECS.index(entry.codec),
            NO_BASE if entry.base is None else digests.index(entry.base),
        )
        for entry in table
    ]
    extra = tuple(digests[len(checkpoint.manifest.direct_chunks) :])
    placement = Placement(checkpoint.manifest.digest, (pack,), Rows(rows or own), Digests(extra))
    key = ObjectKey("placements", placement.digest, 0)
    reg.handle.store.backend.put(str(key), placement.encode())
    _place(checkpoint, reg, placement=placement.digest, placement_generation=0)


def _chain(run, links: int):
    """Return a checkpoint of one chunk, and what a pack of it says, as deltas on one another."""
    values = [np.full(4000, number, np.uint8) for number in range(links + 1)]
    checkpoint = run.save({"m": {"w": values[0]}}, step=1)
    digests = [Digest.of(value.tobytes()) for value in values]
    assert list(checkpoint.manifest.direct_chunks) == digests[:1]
    frames = [codecs.encode(a ^ b, 1, ZSTD) for a, b in pairwise(values)] + [
        codecs.encode(values[-1], 1, ZSTD)
    ]
    bases = [*digests[1:], None]
    return checkpoint, [
        (digest, frame, 4000, ZSTD, base)
        for digest, frame, base in zip(digests, frames, bases, strict=True)
    ]


@pytest.mark.parametrize("links", [0, 1, 2, MAX_DEPTH])
def test_what_is_told_of_deltas_as_it_is_is_sound(run, reg, backend, check, links):
    checkpoint, entries = _chain(run, links)
    _forged(checkpoint, reg, entries)
    assert _load(backend, checkpoint)["m"]["w"].tolist() == [0] * 4000
    assert [f for f in check().findings if f.severity == "error"] == []


@pytest.mark.parametrize("column", ["base", "no base", "codec", "stored length"])
def test_each_column_of_a_row_is_held_against_the_table(run, reg, backend, check, column):
    checkpoint, entries = _chain(run, 2)
    at = len(entries[0][1])
    row = ChunkRow(0, 0, at, CODECS.index(ZSTD), 1)
    changed = {
        "base": {"base": 2},
        "no base": {"base": NO_BASE},
        "codec": {"codec": CODECS.index(LZ4)},
        "stored length": {"stored_bytes": at - 1},
    }[column]
    second = ChunkRow(0, at, len(entries[1][1]), row.codec, 2)
    third = ChunkRow(0, at + len(entries[1][1]), len(entries[2][1]), row.codec)
    _forged(checkpoint, reg, entries, rows=[row._replace(**changed), second, third])
    with pytest.raises(IntegrityError, match=r"different chunks|another"):
        _load(backend, checkpoint)
    (found,) = [f for f in check().findings if f.severity == "error"]
    assert found.kind == "placement"
    assert "name different chunks" in found.message
    assert found.affects == (checkpoint.ref,)


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("change", [-8, 8, 2**40])
def test_a_raw_length_that_is_false_is_found(run, reg, check, which, change):
    checkpoint, entries = _chain(run, 2)
    digest, frame, raw_bytes, codec, base = entries[which]
    entries[which] = (digest, frame, raw_bytes + change, codec, base)
    _forged(checkpoint, reg, entries)
    (found,) = [f for f in check().findings if f.severity == "error"]
    assert (found.kind, "another raw length" in found.message) == ("placement", True)


@pytest.mark.parametrize("change", [-8, 8, 2**40])
def test_a_raw_length_is_false_of_a_chunk_that_stands_alone(run, reg, check, change):
    checkpoint, entries = _chain(run, 0)
    ((digest, frame, raw_bytes, codec, base),) = entries
    if codec == RAW:
        codec, frame = ZSTD, frame[:-1]
    _forged(checkpoint, reg, [(digest, frame, raw_bytes + change, codec, base)])
    (found,) = [f for f in check().findings if f.severity == "error"]
    assert (found.kind, "another raw length" in found.message) == ("placement", True)


@pytest.mark.parametrize("end", ["deep", "circle"])
def test_deltas_without_end_are_found(run, reg, backend, check, end):
    checkpoint, entries = _chain(run, MAX_DEPTH + 1 if end == "deep" else 2)
    if end == "circle":
        entries[-1] = (*entries[-1][:4], entries[0][0])
    _forged(checkpoint, reg, entries)
    with pytest.raises(IntegrityError, match="too long"):
        _load(backend, checkpoint)
    (found,) = [f for f in check().findings if f.severity == "error"]
    assert (found.kind, "too long" in found.message) == ("placement", True)


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
    monkeypatch.setattr("holdfast.registry.history.log.SNAPSHOT_EVERY", 2)
    run = reg.create_run("long")
    for step in range(3):
        run.save(small_state(), step=step)
    return next(info.key for info in backend.list("runs/long/snapshots/"))


def _with_header(backend, key: str, header: bytes) -> None:
    _, *rest = split_lines(backend.get(key), where=key)
    backend.put(key, join_lines([header, *rest]))


@pytest.mark.parametrize("replay", [1, PARTED_VERSION + 1])
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


# What an error costs


@pytest.fixture
def rich(reg):
    """A run in which everything that can hold a state holds one, and a fork of it."""
    run = reg.create_run("rich", seed=1)
    first = run.save(small_state(1), step=1, companions={"teacher": small_state(8)})
    run.pins.gates.set("good", first)
    run.pins.tags.set("keeper", first)
    run.releases.publish("1.0.0", first)
    run.pool.promote(first)
    run.pins.artifacts.set("grp", small_state(1))
    run.streams["loss"].append([{"step": 1, "loss": 0.5}])
    reg.fork(first, "fork")
    return first


def test_everything_that_holds_a_state_is_named(rich, check, backend):
    key = packs_of(rich)[0]
    flip(backend, key, 9)
    (finding,) = check().findings
    step = rich.ref.partition("/")[2]
    assert {f"rich/{step}", "rich/gates/good", "rich/artifacts/grp", f"fork/{step}"} <= {
        *finding.affects
    }
    named = [ref.split("/")[1] for ref in finding.affects]
    assert {"releases", "pool"} <= {*named}


def test_companions_and_streams_are_named(rich, check, backend, open_registry):
    fresh = open_registry(backend)
    state = fresh.run("rich").manifest
    for name, manifest in (
        ("companions", state.checkpoints[0].companions["teacher"]),
        ("streams", state.stream("loss").segments[0].manifest),
    ):
        key = str(state.by_manifest[manifest].placement_key)
        data = backend.get(key)
        backend.delete(key)
        (finding,) = check().findings
        assert any(name in ref for ref in finding.affects)
        backend.put(key, data)


def test_each_object_is_read_once_whatever_names_it(rich, check, backend):
    calls = []
    with open_on(Metered(backend, calls)) as registry:
        assert registry.verify(deep=True).ok
    whole = [call.key for call in calls if call.method == "get" and call.byte_range is None]
    read = [key for key in whole if key in objects(backend)]
    assert sorted(read) == sorted(objects(backend))


def test_findings_come_in_the_same_order_however_threads_run(two, reg, backend):
    for key in objects(backend):
        flip(backend, key, 9)
    backend.put("notes.txt", b"x")
    flip(backend, slot_key("run", 2))
    orders = [tuple(f.where for f in reg.verify(deep=True).findings) for _ in range(4)]
    inline = without_threads(open_on(backend)).verify(deep=True)
    assert {*orders} == {tuple(f.where for f in inline.findings)}
    named = [where for where in orders[0] if where in objects(backend)]
    assert named == sorted(named)
    assert len(named) > 4


# What collection relies on


def test_what_was_condemned_and_spared_is_no_finding(two, check, backend):
    backend.put(epoch_key(1), encode_sweep(1, map(ObjectKey.parse, objects(backend))))
    assert check().findings == ()


def test_what_is_condemned_needed_and_gone_is_told_with_the_sweep(two, check, backend):
    key = packs_of(two[0])[0]
    backend.put(epoch_key(1), encode_sweep(1, []))
    backend.put(epoch_key(2), encode_sweep(2, [ObjectKey.parse(key)]))
    backend.delete(key)
    (finding,) = check().findings
    assert (finding.kind, finding.severity) == ("missing", "error")
    assert "condemned by epoch 2" in finding.message


@pytest.mark.parametrize("kind", ["packs", "manifests", "placements", "runs", "epochs"])
def test_a_foreign_file_that_stops_collection_says_so(two, check, backend, kind):
    backend.put(f"{kind}/stray", b"x")
    found = [f for f in check().findings if f.kind == "unknown-file"]
    assert [f.where for f in found] == [f"{kind}/stray"]
    assert "collected while it is there" in found[0].advice


def test_a_foreign_file_elsewhere_stops_nothing(two, check, backend):
    backend.put("notes.txt", b"x")
    (finding,) = check().findings
    assert "collected" not in finding.advice


def test_an_object_above_the_highest_epoch_tells_that_the_epochs_lost_their_end(
    run, check, backend
):
    for epoch in (1, 2):
        backend.put(epoch_key(epoch), encode_sweep(epoch, []))
    run.save(small_state(), step=1)
    assert check().ok
    backend.delete(epoch_key(2))
    (finding,) = check().findings
    assert (finding.kind, finding.where, finding.severity) == ("epoch", epoch_key(2), "error")
    assert "ends at 1" in finding.message
    assert f"{len(objects(backend))} objects" in finding.message


def test_a_mark_above_the_highest_epoch_tells_the_same(two, check, backend, reg):
    backend.put(epoch_key(1), encode_sweep(1, []))
    log = RunLog(reg.handle.store, "run")
    log.open()
    log.append(lambda state: [Mark(epoch=1)])
    assert check().ok
    backend.delete(epoch_key(1))
    (finding,) = check().findings
    assert "marks in run" in finding.message


def test_an_epoch_that_admits_older_writers_again_is_found(two, check, backend):
    backend.put(epoch_key(1), encode_upgrade(1, 2))
    backend.put(epoch_key(2), encode_sweep(2, []))
    assert [f.where for f in check().findings if f.severity == "error"] == [epoch_key(2)]


# Logs and their snapshots


def test_what_stands_before_a_gap_is_still_checked(two, check, backend):
    backend.delete(slot_key("run", 2))
    backend.put(slot_key("run", 3), b"whatever")
    flip(backend, packs_of(two[0])[0], 9)
    report = check()
    assert report.checkpoints == 1
    assert {f.kind for f in report.findings if f.severity == "error"} == {"log", "pack"}
    (log,) = [f for f in report.findings if f.kind == "log"]
    assert log.affects == ("run from slot 2 on",)


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_a_log_that_ends_before_its_snapshot_lost_its_end(reg, backend, check, monkeypatch, lost):
    monkeypatch.setattr("holdfast.registry.history.log.SNAPSHOT_EVERY", 2)
    run = reg.create_run("long")
    for step in range(5):
        run.save(small_state(), step=step)
    slots = sorted(contents(backend, "runs/long/log/"))
    taken = max(snapshot_slot(info.key) for info in backend.list("runs/long/snapshots/"))
    assert taken == len(slots) - 1
    for key in slots[-lost:]:
        backend.delete(key)
    found = [f for f in check().findings if f.kind == "log"]
    assert [(f.where, f.severity) for f in found] == [("long", "error")]
    assert f"after slot {taken}" in found[0].message
    assert found[0].affects == (f"long from slot {len(slots) - lost} on",)


def test_a_snapshot_that_says_something_else_than_its_log_is_an_error(reg, backend, snapshot):
    """It ties to its slot, so every reader takes its word."""
    header, body = split_lines(backend.get(snapshot), where=snapshot)
    changed = body.replace(b'"run.create"', b'"run.create"').replace(b'"step":0', b'"step":7')
    assert changed != body
    backend.put(snapshot, join_lines([header, changed]))
    (finding,) = reg.verify().findings
    assert (finding.kind, finding.where, finding.severity) == ("snapshot", snapshot, "error")
    assert "Delete this file" in finding.advice


def test_a_sound_snapshot_agrees_with_its_log(reg, backend, snapshot):
    assert reg.verify().findings == ()


# A registry in use


def _verified(backend, prefix, action, *, deep=False, method="get"):
    """Verify while `action` happens before the first read of a key with a prefix."""
    hooked = Hooked(backend)
    hooked.before = Once(prefix, action, method)
    with open_on(hooked) as registry:
        report = registry.verify(deep=deep)
    assert hooked.before.done
    return report


@pytest.mark.parametrize("prefix", ["manifests/", "placements/", "packs/"])
def test_what_is_let_go_and_collected_meanwhile_is_no_finding(run, backend, prefix, open_registry):
    save_small(run, 1, 2, 3)

    def collect():
        other = open_registry(backend)
        other.run("run").retention.prune(Retention(last=1))
        before = objects(backend)
        other.gc(grace_s=0)
        assert objects(backend) < before

    report = _verified(backend, prefix, collect, deep=True)
    assert report.findings == ()
    assert open_registry(backend).verify(deep=True).findings == ()


def test_what_is_collected_after_the_logs_are_read_is_no_finding(run, backend, open_registry):
    """Shallow: nothing but the listing of objects and the reading of manifests comes after."""
    save_small(run, 1, 2, 3)

    def collect():
        other = open_registry(backend)
        other.run("run").retention.drop("not wanted", now=True)
        other.gc(grace_s=0)
        assert not objects(backend)

    assert _verified(backend, "manifests/", collect).findings == ()


def test_what_a_repack_moved_meanwhile_is_checked_where_it_went(two, backend, open_registry):
    """Put under the next epoch, the old objects gone; one pack is damaged on the way."""
    old = objects(backend)
    flipped: list[str] = []

    def move():
        backend.put(epoch_key(1), encode_sweep(1, map(ObjectKey.parse, old)))
        other = open_registry(backend)
        for checkpoint in other.run("run").checkpoints():
            _move(other, checkpoint)
        for key in old:
            backend.delete(key)
        flipped.append(next(key for key in sorted(objects(backend)) if "placements" in key))
        flip(backend, flipped[0])

    report = _verified(backend, "manifests/", move)
    assert [f.where for f in report.findings] == flipped
    assert all(key.endswith(".1") for key in objects(backend))


def _move(registry, checkpoint) -> None:
    from holdfast.registry.writing.adopting import adopt
    from holdfast.registry.writing.object_writer import ObjectWriter

    log = RunLog(registry.handle.store, "run")
    log.open()
    writer = ObjectWriter(registry.handle.store, log)
    places, choice = adopt(
        registry.handle.store, registry.handle.store, writer, [checkpoint.handle.reader.place]
    )
    writer.commit(lambda state: places, choice)


@pytest.mark.parametrize("prefix", ["runs/run/log/", "manifests/", "packs/", "epochs/"])
def test_what_is_saved_and_swept_meanwhile_is_no_finding(
    two, backend, prefix, open_registry, monkeypatch
):
    monkeypatch.setattr("holdfast.registry.history.log.SNAPSHOT_EVERY", 1)
    backend.put(epoch_key(1), encode_sweep(1, []))

    def save():
        other = open_registry(backend)
        backend.put(epoch_key(2), encode_sweep(2, []))
        other.run("run").save(small_state(9), step=9)
        other.create_run("born").save(small_state(10), step=1)

    assert _verified(backend, prefix, save, deep=True).findings == ()


def test_what_is_gone_and_still_needed_is_told_however_late_it_went(two, backend):
    key = packs_of(two[0])[0]
    report = _verified(backend, "placements/", lambda: backend.delete(key))
    assert report.ok, "it was there when the objects were listed"
    report = _verified(backend, "runs/run/log/", lambda: backend.delete(key))
    assert [f.where for f in report.findings] == [key]


def test_a_pack_that_is_whole_when_it_is_read_again_is_a_note(two, backend):
    key = packs_of(two[0])[0]
    whole = backend.get(key)
    flip(backend, key, 9)
    # The structure is read after the data.
    report = _verified(backend, "runs/run/log/", lambda: backend.put(key, whole), deep=True)
    assert report.ok
    assert [(f.where, f.severity) for f in report.findings] == [(key, "note")]
    assert "whole when it was read again" in report.findings[0].message


def test_a_damaged_orphan_that_is_collected_meanwhile_is_no_finding(two, backend):
    stray = packs_of(two[0])[0]
    stray = stray[:-3] + ("7" if stray[-3] != "7" else "8") + ".0"
    backend.put(stray, b"noise")
    gone = _verified(backend, "manifests/", lambda: backend.delete(stray), deep=True)
    assert gone.findings == ()


# Stores that fail


class _Failing(Wrapper):
    def __init__(self, inner, key: str, error: Exception) -> None:
        super().__init__(inner)
        self._key, self._error = key, error

    def get(self, key, byte_range=None, *, into=None):
        if key == self._key:
            raise self._error
        return super().get(key, byte_range, into=into)


@pytest.mark.parametrize("kind", ["packs", "manifests", "placements"])
def test_a_sector_that_cannot_be_read_is_a_finding(two, backend, kind):
    key = next(key for key in sorted(objects(backend)) if key.startswith(kind))
    error = StorageError("the file system failed: input/output error", where=key)
    with open_on(_Failing(backend, key, error)) as registry:
        (finding,) = registry.verify(deep=True).findings
    assert (finding.where, finding.severity) == (key, "error")
    assert "input/output error" in finding.message
    assert finding.affects


@pytest.mark.parametrize("kind", ["packs", "manifests", "runs"])
def test_a_store_that_does_not_answer_ends_the_verification(two, backend, kind):
    key = next(key for key in sorted(contents(backend)) if key.startswith(kind))
    error = StoreUnavailable("no answer", where=key)
    with open_on(_Failing(backend, key, error)) as registry, pytest.raises(StoreUnavailable):
        registry.verify(deep=True)
