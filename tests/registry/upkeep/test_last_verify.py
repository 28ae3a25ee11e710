"""The last verification of a registry, as this machine remembers it."""

from __future__ import annotations

import gc
import os
import re
import shutil
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast import Retention
from holdfast.backends import ObjectInfo, parse
from holdfast.backends.memory import MemoryBackend
from holdfast.backends.wrappers import Metered
from holdfast.registry.face import open_on
from holdfast.registry.history.actions import Place
from holdfast.registry.objects import ObjectKey, slot_key, snapshot_key
from holdfast.registry.objects.framing import unwrap_frame, wrap_frame
from holdfast.registry.store import Address
from holdfast.registry.store.heads import folder, memory, open_heads
from holdfast.registry.upkeep import VerifyReport, verify_notes
from holdfast.registry.upkeep.file_names import Names
from holdfast.registry.upkeep.placement_checks import Fault, PacksOf
from holdfast.registry.upkeep.verify_notes import Damage, LastCheck, known_damage, last_verify
from holdfast.registry.upkeep.verifying import Verification
from holdfast.registry.values import Digest
from tests.support.inline import without_threads
from tests.support.stores import new_backend


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


# What is new since the last one


@pytest.fixture
def many(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(verify_notes, "_AGAIN_WITHIN", 2**40)  # nothing is read again in its turn
    with holdfast.open(place) as reg:
        for name in ("a", "b"):
            for step in range(5):
                reg.run(name, create=True).save({"w": np.full(99, step)}, step=step)
        reg.run("r").save({"w": np.arange(1001.0)}, step=2)
    check(place)
    return place


def check(place: Path, *, since_last: bool = True, **options: object) -> VerifyReport:
    """Verify in a new process; `check.asked` has the keys that were read, without lists."""
    calls: list = []
    meter = Metered(Address(place).open(), calls)
    with open_on(meter, heads=open_heads(parse(place))) as reg:
        report = reg.verify(since_last=since_last, **options)
    check.asked = {one.key for one in calls if one.method != "list"}
    check.listed = {one.key for one in calls if one.method == "list"}
    return report


def of(folders: tuple[str, ...]) -> set[str]:
    return {key for key in check.asked | check.listed if key.startswith(folders) and "/" in key[6:]}


def _local(suffix: str) -> Path:
    (found,) = Path(os.environ["XDG_STATE_HOME"]).rglob(f"*{suffix}")
    return found


STATES = ("manifests/", "placements/")


def files(place: Path) -> set[str]:
    found = [str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()]
    return {key for key in found if key.startswith(("runs/", *STATES))}


def test_only_what_is_new_is_read(many: Path) -> None:
    whole = check(many, since_last=False)
    found = check(many)
    assert (found.findings, found.unchanged, found.runs) == ((), 3, 3)
    assert (found.checkpoints, found.objects) == (whole.checkpoints, whole.objects)
    assert not of(("runs/", *STATES))
    before = files(many)
    with holdfast.open(many) as reg:
        reg.run("a").save({"w": np.full(99, 77)}, step=77)
    new = files(many) - before
    found = check(many)
    assert (found.findings, found.unchanged, found.checkpoints) == ((), 2, whole.checkpoints + 1)
    assert of(("runs/", *STATES)) - {"runs/a/log/"} == new
    # A sample compares the states whose packs it has read.
    assert check(many, sample=1e-9).unchanged == 3
    assert 0 < len(of(STATES)) < len([key for key in files(many) if key.startswith(STATES)])
    check(many, sample=1e-9, resume=many.parent / "pass")
    found = check(many, resume=many.parent / "pass")  # reads the rest, and compares all
    assert found.data is not None
    assert found.data.packs_noted
    assert of(STATES) == {key for key in files(many) if key.startswith(STATES)}
    # What was evicted is brought back: a replay that begins later does not know it.
    with holdfast.open(many) as reg:
        reg.run("b").retention.prune(Retention(last=1))
        assert check(many).ok
        reg.run("b").retention.undo()
    found = check(many)
    assert (found.findings, found.checkpoints) == ((), whole.checkpoints + 1)


def _slot(place: Path, n: int) -> Path:
    return place / slot_key("a", n)


def _put(path: Path, data: bytes, *, keeps_time: bool = False) -> None:
    path.parent.mkdir(exist_ok=True)
    times = path.stat() if keeps_time else None
    path.write_bytes(data)
    if times is not None:
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def _flip(path: Path, *, keeps_time: bool = False) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    _put(path, bytes(data), keeps_time=keeps_time)


def _one(place: Path, kind: str) -> Path:
    return sorted((place / kind).rglob("*.0"))[0]


def _beyond(place: Path) -> None:
    _slot(place, 6).write_bytes(b"garbage")


def _cut(path: Path, *, keeps_time: bool = False) -> None:
    _put(path, path.read_bytes()[:-3], keeps_time=keeps_time)


HARM: dict[str, Callable[[Path], object]] = {
    "a slot is lost": lambda place: _slot(place, 2).unlink(),
    "the newest slot is lost": lambda place: _slot(place, 5).unlink(),
    "a slot is cut": lambda place: _cut(_slot(place, 3)),
    "a slot is rewritten": lambda place: _flip(_slot(place, 3)),
    "a slot is cut, and its time is as it was": lambda place: _cut(
        _slot(place, 3), keeps_time=True
    ),
    "a snapshot of an older slot": lambda place: _put(place / snapshot_key("a", 2), b"garbage"),
    "the newest slot is rewritten": lambda place: _flip(_slot(place, 5)),
    "a slot of garbage": _beyond,
    "a run is gone": lambda place: shutil.rmtree(place / "runs" / "a"),
    "a pack is gone": lambda place: _one(place, "packs").unlink(),
    "a pack is cut": lambda place: _cut(_one(place, "packs")),
    "a manifest is gone": lambda place: _one(place, "manifests").unlink(),
    "a placement is cut": lambda place: _cut(_one(place, "placements")),
}


@pytest.mark.parametrize("harm", HARM)
def test_what_was_harmed_since_is_told_as_by_a_full_check(many: Path, harm: str) -> None:
    check(many)
    HARM[harm](many)
    found = check(many)
    assert found.findings
    assert check(many).findings == check(many, since_last=False).findings == found.findings


def test_a_pack_of_a_new_state_that_has_a_fault_names_the_states_that_were_not_read(
    many: Path,
) -> None:
    with holdfast.open(many) as reg:
        store = reg.handle.store
        with closing(LastCheck(store)) as last:
            verification = Verification(store, last=last)
            assert verification.check().unchanged == 3
        packs = [ObjectKey.parse(str(one.relative_to(many))) for one in many.rglob("packs/*/*.0")]
        verification.faults.update((pack, Fault("as of another state")) for pack in packs)
        found = {need.refs for needs in verification.needs().values() for need in needs}
    # The states of `a` and `b` are the same.
    assert len(found) == 12
    assert {len(verification.needs()[pack]) for pack in packs} == {1, 2}


def test_objects_and_packs_of_states_take_no_memory_each(place: Path) -> None:
    class Listed(MemoryBackend):
        def list(self, *given: object, **options: object) -> Iterator[ObjectInfo]:
            for n in range(4_000):
                digest = Digest.of(str(n).encode())
                yield ObjectInfo(str(ObjectKey("packs", digest, 3)), n, 0.0)

    with holdfast.open(place) as reg:
        store = reg.handle.store
        store.backend = Listed()
        digest, known = Digest.of(b"state"), PacksOf()
        tracemalloc.start()
        names = Names()
        names.list_objects(store)
        for n in range(160):
            packs = {str(ObjectKey("packs", digest, n)): n for n in range(25)}
            at = Place(
                manifest=digest, manifest_generation=n, placement=digest, placement_generation=0
            )
            known.keep(at, packs)
        taken, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert (len(names.sizes), len(known.of(at))) == (4_000, 25)
    assert taken < 100_000  # 300 bytes for each were 2.4 MB


def test_states_of_runs_take_no_memory_each() -> None:
    taken = []
    for steps in (20, 120):
        backend = new_backend()
        with without_threads(open_on(backend)) as reg:
            for name in ("whole", "thinned"):
                run = reg.create_run(name)
                for step in range(1, steps + 1):
                    run.save({part: {"w": np.full(9, step)} for part in (name, "rest")}, step=step)
            run.retention.prune(Retention(last=1, then=["thinned"]))
        with open_on(backend) as reg:
            verification = Verification(reg.handle.store)
            verification.read_data()
            verification.check()  # the first one imports
            held = []
            for _ in range(3):  # the least: now and then a thread of the pool begins in one
                gc.collect()
                tracemalloc.start()
                assert verification.check().checkpoints == 2 * steps
                gc.collect()
                held.append(tracemalloc.get_traced_memory()[0])
                tracemalloc.stop()
            taken.append(min(held))
    assert taken[1] - taken[0] < 200 * 500  # bytes of each of 200 states: they were 1,000


def test_damage_that_was_told_stays_told(many: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # In the bytes alone, with the same size and time.
    for path in (_one(many, "manifests"), _slot(many, 4)):
        whole = path.read_bytes()
        _flip(path, keeps_time=True)
        assert check(many).ok  # which read neither
        told = check(many, since_last=False).findings
        assert told
        for _ in range(2):
            assert check(many).findings == told
        _local(".verified").unlink()
        assert check(many).findings == told
        _put(path, whole, keeps_time=True)
        assert check(many).ok
        assert check(many).unchanged == 3


@pytest.mark.parametrize("harmed", ["a log", "a state"])
def test_a_few_checks_together_read_everything_again(
    many: Path, monkeypatch: pytest.MonkeyPatch, harmed: str
) -> None:
    monkeypatch.setattr(verify_notes, "_AGAIN_WITHIN", 3)
    check(many)
    assert sum(check(many).unchanged for _ in range(3)) == 2 * 3  # each of three runs is read once
    _flip(_slot(many, 4) if harmed == "a log" else _one(many, "manifests"), keeps_time=True)
    found = [check(many).ok for _ in range(4)]
    assert found == sorted(found, reverse=True)
    assert not found[2]


@pytest.mark.parametrize("bound", ["_KEPT", "_REFS"])
def test_damage_that_is_not_kept_by_name_stays_told(
    many: Path, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    monkeypatch.setattr(verify_notes, bound, 0)
    _flip(_one(many, "manifests"), keeps_time=True)
    told = check(many, since_last=False).findings
    assert told
    assert check(many).findings == told


def test_an_older_file_of_heads_and_a_wrong_memory_cost_time(many: Path, tmp_path: Path) -> None:
    heads = tmp_path / "audit.heads"
    assert check(many, write_heads=heads).unchanged == 3
    with holdfast.open(many) as reg:
        reg.gc(grace_s=0)
        for step in (20, 21):
            reg.run("a").save({"w": np.full(99, step)}, step=step)
    assert check(many).ok
    found = check(many, heads=heads)
    assert (found.findings, found.unchanged) == ((), 2)  # the link of `a` is before its beginning
    kept = _local(".checked-0")
    for damage in (b"", kept.read_bytes()[:-1] + b"x", _of_another_history(kept)):
        kept.write_bytes(damage)
        with open_on(Address(many).open()) as reg:
            reg.run("b").streams["s"].append([{"step": 1}])
        assert check(many).findings == ()
    assert check(many).unchanged == 3


def test_runs_are_remembered_in_parts_that_are_written_where_something_changed(
    many: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = unwrap_frame(_local(".checked-0").read_bytes(), where="").split(b"\n")
    with monkeypatch.context() as patch:  # a part holds the runs that fit
        patch.setattr(verify_notes, "_PART_BYTES", sum(map(len, lines[1:])) - 1)
        check(many)
        assert check(many).unchanged == 2
    monkeypatch.setattr(verify_notes, "_RUNS_A_PART", 1)
    check(many)
    parts = {one.name: one for one in _local(".checked").parent.glob("*.checked-*")}
    assert len(parts) > 1
    before = {name: one.stat().st_ino for name, one in parts.items()}
    with holdfast.open(many) as reg:
        reg.run("a").save({"w": np.full(99, 77)}, step=77)
    assert check(many).unchanged == 2
    after = {name: one.stat().st_ino for name, one in parts.items()}
    assert len({*before.items()} ^ {*after.items()}) == 2  # one file was replaced
    # Nobody believes a part that is damaged, or of another registry: its runs are read.
    (mine,) = [name for name in parts if before[name] != after[name]]
    whole = parts[mine].read_bytes()
    with holdfast.open(many) as reg:
        renamed = unwrap_frame(whole, where="").replace(reg.handle.store.config.id.encode(), b"0")
    for harm in (whole[:-1] + b"x", wrap_frame(renamed)):
        _flip(_slot(many, 3), keeps_time=True)
        assert check(many).ok
        parts[mine].write_bytes(harm)
        assert not check(many).ok
        _flip(_slot(many, 3), keeps_time=True)
        assert check(many).ok
    assert holdfast.trust(many)
    assert not list(_folder().glob("*.checked*"))


def _folder() -> Path:
    return Path(os.environ["XDG_STATE_HOME"]) / "holdfast" / "heads"


def _of_another_history(kept: Path) -> bytes:
    """Return the memory with another last commit of `b`."""
    lines = unwrap_frame(kept.read_bytes(), where="").split(b"\n")
    (at,) = [n for n, line in enumerate(lines) if b'"run_id":"b"' in line]
    lines[at] = re.sub(rb'"head":"[0-9a-f]{64}"', b'"head":"' + b"0" * 64 + b'"', lines[at])
    return wrap_frame(b"\n".join(lines))


def test_a_machine_without_space_verifies_and_remembers_nothing(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(**_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(verify_notes, "TemporaryFile", full)
    for _ in range(2):
        with holdfast.open(place) as reg:
            assert reg.verify(since_last=True).ok
