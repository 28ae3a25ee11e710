"""A damaged journal: a typed error, what is sound is kept, and the run goes on."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from holdfast.backends import Backend, Body
from holdfast.backends.base import as_buffers
from holdfast.backends.local import disk
from holdfast.backends.wrappers import Wrapper
from holdfast.registry.errors import (
    AccessDenied,
    Conflict,
    MissingObject,
    StorageError,
    StoreFull,
    StoreUnavailable,
    StoreUnsuitable,
    Stranded,
    UnsupportedFormat,
)
from holdfast.registry.history.actions import TakeOver
from holdfast.registry.objects.framing import join_lines, split_lines
from holdfast.registry.saving.journal import folder as folder_module
from holdfast.registry.saving.journal import pushing
from holdfast.registry.saving.journal.carrier import Carrier
from holdfast.registry.saving.journal.entry_saves import LogScan
from holdfast.registry.saving.journal.folder import RunFolder
from holdfast.registry.saving.journal.records import ID_DIGITS, JournalId, Takeover
from holdfast.registry.saving.journal.settings import Journal
from holdfast.registry.saving.journal.states import EntryStates
from tests.registry.saving.journal.machines import RUN, Machine, Outage, added
from tests.support.faults import Died, Hooked
from tests.support.sameness import assert_same
from tests.support.states import make_state
from tests.support.stores import new_backend, objects, opened


@pytest.fixture
def bucket() -> Backend:
    return new_backend()


@pytest.fixture
def machine(bucket: Backend, tmp_path: Path, by_hand: None) -> Machine:
    return Machine(bucket, tmp_path / "journal")


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes()) or bytearray(1)
    data[len(data) // 2] ^= 1
    path.unlink()  # it may be linked into the next entry
    path.write_bytes(bytes(data))


def _states(machine: Machine, kind: str) -> list[Path]:
    root = Path(machine.folder.states_path(machine.folder.entry(2).write))
    return sorted(path for path in root.glob(f"{kind}/*/*") if path.stat().st_nlink == 1)


def _flip_a_pack(machine: Machine) -> None:
    _flip(_states(machine, "packs")[0])


def _cut_a_pack(machine: Machine) -> None:
    os.truncate(_states(machine, "packs")[0], 100)


def _flip_the_manifest(machine: Machine) -> None:
    _flip(_states(machine, "manifests")[0])


def _lose_the_placement(machine: Machine) -> None:
    _states(machine, "placements")[0].unlink()


def _lose_the_states(machine: Machine) -> None:
    shutil.rmtree(machine.folder.states_path(machine.folder.entry(2).write))


def _tear_the_entry(machine: Machine) -> None:
    write = machine.folder.entry(2).write
    for folder in (Path(machine.folder.path) / "entries", Path(machine.folder.states_path(write))):
        os.truncate(folder / f"{2:020d}", 50)


DAMAGE = [
    _flip_a_pack,
    _cut_a_pack,
    _flip_the_manifest,
    _lose_the_placement,
    _lose_the_states,
    _tear_the_entry,
]


@pytest.mark.parametrize("harm", DAMAGE)
def test_damage_costs_one_save(
    harm: Callable[[Machine], None], machine: Machine, bucket: Backend
) -> None:
    run = machine.run()
    for step in (1, 2):
        run.save(make_state(step), step=step)
    harm(machine)
    again = machine.run()
    restored = again.restore()
    assert restored.checkpoint.step == 1
    assert_same(restored.state, make_state(1))
    again.save(make_state(3), step=3)
    machine.carry()
    assert [step for step, _ in added(bucket)] == [1, 3]
    assert machine.outcomes()[2] == "damaged"
    with pytest.raises(Conflict, match="is damaged"):
        again.wait(remote=True)
    again.save(make_state(4), step=4)
    machine.carry()
    with opened(bucket) as registry:
        assert registry.verify(deep=True).findings == ()
        assert [one.step for one in registry.run(RUN).checkpoints()] == [1, 3, 4]


class _Late(Wrapper):
    """A store to which the put of a slot is still under way when its process dies."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.late: list[tuple[str, bytes]] = []

    def put_if_absent(self, key: str, body: Body) -> bool:
        if "/log/" in key:
            self.late.append((key, b"".join(as_buffers(body))))
            raise Died
        return super().put_if_absent(key, body)


@pytest.mark.parametrize("is_lost", [True, False], ids=["lost there too", "stored there"])
@pytest.mark.parametrize("harm", [_flip_a_pack, _tear_the_entry])
def test_no_put_of_a_dead_carrier_lands_behind_the_note_of_damage(
    harm: Callable[[Machine], None],
    is_lost: bool,
    tmp_path: Path,
    machine: Machine,
    bucket: Backend,
) -> None:
    run = machine.run()
    run.save(make_state(1), step=1)
    machine.carry()
    run.save(make_state(2), step=2)
    before, dying = objects(bucket), _Late(bucket)
    with pytest.raises(Died):
        Machine(dying, tmp_path / "journal").carry()
    harm(machine)
    for key in objects(bucket) - before if is_lost else ():
        bucket.delete(key)
    machine.carry()
    is_carried = harm is _flip_a_pack and not is_lost
    assert machine.outcomes()[2] == ("carried" if is_carried else "damaged")
    assert [bucket.put_if_absent(*one) for one in dying.late] == [False]
    assert [step for step, _ in added(bucket)] == [1, 2][: 1 + is_carried]


def _harm(path: Path, how: str) -> None:
    if how == "flipped":
        _flip(path)
    elif how == "emptied":
        path.unlink()
        path.touch()
    elif how == "deleted":
        path.unlink()
    else:
        for name in (f"{path.name}~", f".{path.name}.swp", "note.txt"):
            (path.parent / name).write_text("of an editor")


def _file(machine: Machine, kind: str) -> Path:
    """Return the file of a kind that step 3 needs, or that all need; the note is of step 1."""
    folder = Path(machine.folder.path)
    if kind in ("packs", "manifests", "placements"):
        states = Path(machine.folder.states_path(machine.folder.entry(3).write))
        return next(path for path in states.glob(f"{kind}/*/*") if path.stat().st_nlink == 1)
    numbers = {"machines": 1, "takeovers": 1, "entries": 3, "notes": 1}
    return folder / kind / f"{numbers[kind]:020d}" if kind in numbers else folder / kind


#: The files of a journal, and whether damage to them costs the save of step 3.
FILES = ["machines", "takeovers", "notes", "entries"]
FILES += ["journal.json", "lock-carrying", "lock-acknowledging"]
OWN_FILES = ["packs", "manifests", "placements"]


HOWS = ["flipped", "emptied", "deleted", "beside"]
#: Two damages to each kind of file in every check, and each damage to half of the kinds.
HARMS = [
    pytest.param(kind, how, marks=pytest.mark.soak if (row + column) % 2 else ())
    for row, kind in enumerate([*FILES, *OWN_FILES])
    for column, how in enumerate(HOWS)
]


@pytest.mark.parametrize(("kind", "how"), HARMS)
def test_any_damaged_file_costs_at_most_its_own_save(
    kind: str, how: str, machine: Machine, bucket: Backend
) -> None:
    run = machine.run()
    run.save(make_state(1), step=1)
    machine.carry()
    for step in (2, 3, 4):
        run.save(make_state(step), step=step)
    if kind == "journal.json":
        _as_version_1(machine)
    _harm(_file(machine, kind), how)
    again = machine.run()
    assert_same(again.restore().state, make_state(4))
    run.save(make_state(5), step=5)  # the handle that had it open goes on
    with suppress(Conflict):  # of step 3, once
        again.wait(remote=True, timeout_s=0) if machine.carry() else None
    assert again.restore().checkpoint.step == 5
    again.save(make_state(6), step=6)
    machine.carry()
    lost = [3] if kind in OWN_FILES and how != "beside" else []
    assert [step for step, _ in added(bucket)] == [n for n in range(1, 7) if n not in lost]
    with opened(bucket) as registry:
        assert registry.verify(deep=True).findings == ()
    outcomes = machine.outcomes()
    assert outcomes.pop(3, "") == ("damaged" if lost else "")
    assert set(outcomes.values()) == {"carried"}
    assert again.backlog().entries == 0


@pytest.mark.parametrize("number", [1, 3])
def test_a_later_program_carries_a_save_whose_entry_was_deleted(
    number: int, tmp_path: Path, by_hand: None, caplog: pytest.LogCaptureFixture
) -> None:
    bucket = new_backend()
    run = Machine(bucket, tmp_path / "journal").run()
    for step in (1, 2, 3):
        run.save(make_state(step), step=step)
    later = Machine(bucket, tmp_path / "journal")
    (Path(later.folder.path) / "entries" / f"{number:020d}").unlink()
    shutil.copytree(
        later.folder.states_path(later.folder.entry(2).write),
        later.folder.states_path("0123456789abcdef"),  # a copy is not that entry's states
    )
    if number == 3:  # the first one comes back by the carrier
        assert later.run().restore().checkpoint.step == 3
    later.carry()
    assert f"entry {number} of the journal was lost or damaged, and is restored" in caplog.text
    assert [step for step, _ in added(bucket)] == [1, 2, 3]
    assert not Path(later.folder.states_path("0123456789abcdef")).exists()
    run.wait(remote=True)


@pytest.mark.parametrize("harm", ["flipped", "deleted"])
def test_an_entry_is_restored_while_another_save_is_being_written(
    harm: str, machine: Machine, bucket: Backend
) -> None:
    run = machine.run()
    for step in (1, 2, 3):
        run.save(make_state(step), step=step)
    entry = Path(machine.folder.path) / "entries" / f"{2:020d}"
    _flip(entry) if harm == "flipped" else entry.unlink()
    with machine.folder.lock("writing").held(shared=True):
        machine.carry()
    assert [step for step, _ in added(bucket)] == [1, 2, 3]
    assert set(machine.outcomes().values()) == {"carried"}


def test_an_entry_that_is_damaged_while_others_are_carried_is_restored(
    machine: Machine, bucket: Backend
) -> None:
    run = machine.run()
    for step in (1, 2, 3):
        run.save(make_state(step), step=step)
    entry = Path(machine.folder.path) / "entries" / f"{2:020d}"
    machine.carrier(lambda number, note: _flip(entry) if number == 1 else None).carry()
    assert [step for step, _ in added(bucket)] == [1, 2, 3]
    assert set(machine.outcomes().values()) == {"carried"}


@pytest.fixture
def ignores_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the disk of the journal take names that differ in case alone for one."""
    made = RunFolder.__init__

    def make(self: RunFolder, journal: Journal, registry_id: str, run_id: str) -> None:
        made(self, journal, registry_id, run_id.lower())
        self.run_id = run_id

    monkeypatch.setattr(RunFolder, "__init__", make)


def test_runs_whose_names_differ_in_case_alone_are_not_mixed(
    ignores_case: None, machine: Machine, bucket: Backend
) -> None:
    run, other = machine.run(), machine.registry().run(RUN.upper(), create=True, seed=8)
    run.save(make_state(1), step=1)
    for act in (other.restore, lambda: other.save(make_state(9), step=9)):
        with pytest.raises(Conflict, match="belongs to another run"):
            act()
    machine.carry()
    assert [step for step, _ in added(bucket)] == [1]
    # Nothing waits, and the next entry would be the other run's.
    other = machine.registry().run(RUN.upper())
    assert other.restore() is None
    with pytest.raises(Conflict, match="belongs to another run"):
        other.save(make_state(9), step=9)
    run.save(make_state(2), step=2)
    machine.carry()
    assert [step for step, _ in added(bucket)] == [1, 2]


def test_an_entry_of_another_run_is_not_carried(machine: Machine) -> None:
    machine.run().save(make_state(1), step=1)
    other = machine.registry().run("other", create=True, seed=8)
    path = Path(machine.folder.path)
    shutil.copytree(path, path.parent / "other")
    folder = RunFolder(machine.journal, machine.registry().id, "other")
    for act in (other.restore, Carrier(machine.registry().handle.store, folder).carry):
        with pytest.raises(Conflict, match="belongs to another run"):
            act()
    assert folder.noted() == []


def _as_version_1(machine: Machine) -> None:
    """Make the journal one that has no machines, as it was at first."""
    folder = Path(machine.folder.path)
    record = JournalId(format="holdfast.journal/1", id=machine.folder.id())
    shutil.rmtree(folder / "machines")
    (folder / "journal.json").write_bytes(join_lines([record.encode()]))


@pytest.mark.sometimes("the note of an entry is lost")
def test_a_refused_save_whose_note_is_lost_does_not_enter_behind_others(
    machine: Machine, bucket: Backend
) -> None:
    run = machine.run()
    run.save(make_state(1), step=1)
    with opened(bucket) as registry:
        registry.run(RUN).exchange.push(make_state(11), step=1)
    machine.carry()
    again = machine.run()
    again.restore()
    again.save(make_state(2), step=2)
    machine.carry()
    (Path(machine.folder.path) / "notes" / f"{1:020d}").write_bytes(b"")
    machine.carry()
    assert machine.outcomes() == {1: "damaged", 2: "carried"}
    assert [step for step, _ in added(bucket)] == [1, 2]


def test_a_pack_that_all_waiting_saves_share_is_taken_from_the_registry(
    machine: Machine, bucket: Backend
) -> None:
    run, same = machine.run(), make_state(1)
    states = {step: {**same, "step": step} for step in (1, 2, 3)}
    run.save(states[1], step=1)
    machine.carry()
    for step in (2, 3):
        run.save(states[step], step=step)
    root = Path(machine.folder.states_path(machine.folder.entry(3).write))
    packs = [path for path in root.glob("packs/*/*") if path.stat().st_nlink > 2]
    assert packs
    for pack in packs:
        data = bytearray(pack.read_bytes())
        data[len(data) // 2] ^= 1
        with pack.open("r+b") as file:  # the same file for all of them
            file.write(data)
    again = machine.run()
    assert_same(again.restore().state, states[3])
    machine.carry()
    assert [step for step, _ in added(bucket)] == [1, 2, 3]
    with opened(bucket) as registry:
        assert registry.verify(deep=True).findings == ()


def test_a_save_of_a_newer_program_waits_with_those_behind_it(
    machine: Machine, bucket: Backend
) -> None:
    run = machine.run()
    for step in (1, 2, 3):
        run.save(make_state(step), step=step)
    path = Path(machine.folder.path) / "entries" / f"{2:020d}"
    kept = path.read_bytes()
    line = split_lines(kept, where="")[0]
    path.write_bytes(join_lines([line.replace(b"holdfast.journal/2", b"holdfast.journal/3")]))
    for act in (machine.carry, machine.run().restore):
        with pytest.raises(UnsupportedFormat, match="newer Holdfast"):
            act()
    assert machine.folder.backlog().entries == 2
    assert [one.entry is None for one in pushing.listed(machine.folder)] == [True, False]
    path.write_bytes(kept)  # the newer program
    machine.carry()
    assert [step for step, _ in added(bucket)] == [1, 2, 3]


def test_nothing_is_deleted_that_is_not_the_journals(tmp_path: Path, machine: Machine) -> None:
    run = machine.run()
    run.save(make_state(1), step=1)
    states = Path(machine.folder.path) / "states"
    for name in ("notes.txt", "data", "0123456789ABCDEF"):
        (states / name).mkdir()
    outside = tmp_path / "outside"
    (outside / "0123456789abcdef").mkdir(parents=True)
    (states / "fedcba9876543210").symlink_to(outside, target_is_directory=True)
    machine.carry()
    assert len(list(states.iterdir())) == 5
    larger = tmp_path / "larger"
    states.rename(larger)  # as somebody does whose disk is full
    (larger / "fedcba9876543210").unlink()
    (larger / "0000000000000000").mkdir()
    states.symlink_to(larger, target_is_directory=True)
    for act in (lambda: run.save(make_state(2), step=2), machine.carry):
        with pytest.raises(StoreUnsuitable, match="symbolic link"):
            act()
    assert len(list(larger.iterdir())) == 5
    assert list(outside.iterdir())


def test_what_lies_among_the_states_of_a_save_stays_when_they_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: Machine
) -> None:
    run = machine.run()
    for step in (1, 2, 3):
        run.save(make_state(step), step=step)
    states = Path(machine.folder.path) / "states"
    first, second, _ = (
        states / entry.write for _, entry in machine.folder.entries(machine.folder.numbers())
    )
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "notes.txt").write_text("mine")
    for name in ("mine", "packs/mine", "mine/packs", ".tmp/reserve"):
        (first / name).mkdir(parents=True)
    (first / "packs" / "notes.txt").write_text("mine")
    (first / "manifests" / "notes").symlink_to(outside, target_is_directory=True)
    machine.carry()
    assert not second.exists()
    left = {str(path.relative_to(first)) for path in first.rglob("*")}
    assert left == {
        *("mine", "mine/packs", "packs", "packs/mine", "packs/notes.txt"),
        *("manifests", "manifests/notes", ".tmp", ".tmp/reserve"),
    }
    assert (outside / "notes.txt").read_text() == "mine"
    assert [ck.step for ck in machine.run().refresh().checkpoints()] == [1, 2, 3]
    keep_only = EntryStates.keep_only

    def put_beside(self: EntryStates, written: Any) -> None:
        (states / self.write / "packs" / "notes.txt").write_text("mine")
        keep_only(self, written)

    monkeypatch.setattr(EntryStates, "keep_only", put_beside)
    run.save(make_state(4), step=4)  # while it is written
    fourth = states / machine.folder.entry(4).write
    assert (fourth / "packs" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("part", ["registry", "run"])
def test_a_link_below_the_journal_is_refused_and_the_journal_itself_may_be_one(
    part: str, tmp_path: Path, by_hand: None
) -> None:
    machine = Machine(new_backend(), tmp_path / "link")
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk", target_is_directory=True)
    run = machine.run()
    run.save(make_state(1), step=1)
    path = Path(machine.folder.path)
    path = path if part == "run" else path.parent
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    with pytest.raises(StoreUnsuitable, match="symbolic link"):
        run.save(make_state(2), step=2)
    with pytest.raises(StoreUnsuitable, match="symbolic link"):
        machine.carry()


def test_only_this_user_can_read_a_journal(tmp_path: Path, machine: Machine) -> None:
    (tmp_path / "journal").mkdir(mode=0o755)
    before = os.umask(0)
    try:
        machine.run().save(make_state(1), step=1)
    finally:
        os.umask(before)
    made = [path for path in (tmp_path / "journal").rglob("*") if ".tmp" not in path.parts]
    modes = {path.stat().st_mode & 0o077 for path in made}
    assert modes == {0}
    assert (tmp_path / "journal").stat().st_mode & 0o777 == 0o755  # it may have other things
    (tmp_path / "journal").chmod(0o1777)  # as /tmp is
    machine.run().restore()
    machine.carry()


@pytest.mark.parametrize("whose", ["another user", "every user"])
def test_a_folder_of_others_is_refused(
    whose: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: Machine
) -> None:
    (tmp_path / "journal").mkdir()
    if whose == "every user":
        (tmp_path / "journal").chmod(0o777)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(AccessDenied, match=whose):
        machine.run().save(make_state(1), step=1)
    assert list((tmp_path / "journal").glob("*/*")) == []


def test_a_full_disk_of_the_journal_is_carried(
    monkeypatch: pytest.MonkeyPatch, machine: Machine, bucket: Backend
) -> None:
    run = machine.run()
    for step in (1, 2):
        run.save(make_state(step), step=step)
    reserve, write = Path(machine.folder.path) / ".tmp" / "reserve", disk.write_all
    room = len(list(reserve.iterdir()))
    assert room >= 32

    def write_if_room(*given: object) -> None:
        if len(list(reserve.iterdir())) == room:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(*given)

    with monkeypatch.context() as full:
        full.setattr(disk, "write_all", write_if_room)
        machine.carry()
    assert [step for step, _ in added(bucket)] == [1, 2]
    assert machine.outcomes() == {2: "carried"}
    noting = iter([StoreFull("no space"), None])

    def note_if_room() -> None:
        if error := next(noting):
            raise error

    monkeypatch.setattr(machine.folder._files, "give_up_reserve", lambda most: 0)
    with pytest.raises(StoreFull):
        machine.folder._with_reserve(note_if_room)


@pytest.mark.parametrize("is_there", [True, False])
def test_a_removed_journal_is_told(is_there: bool, tmp_path: Path, by_hand: None) -> None:
    bucket = Hooked(new_backend())
    machine, outage = Machine(bucket, tmp_path / "journal"), Outage()
    bucket.before = outage
    run = machine.run()
    for step in (1, 2, 3):
        run.save(make_state(step), step=step)
        if step == 1:
            machine.carry()
    shutil.rmtree(machine.journal.path)
    outage.is_down = not is_there
    for _ in range(1 if is_there else 2):
        with pytest.raises((MissingObject, StoreUnavailable), match=r"gone|removed|out of reach"):
            run.wait(remote=True)
        if not is_there:
            with pytest.raises(MissingObject, match="removed"):
                run.save(make_state(4), step=4)
    if not is_there:
        outage.is_down = False
        with pytest.raises(MissingObject, match=r"2 saves .* are gone"):
            run.save(make_state(4), step=4)
    run.save(make_state(4), step=4)
    machine.carry()
    run.wait(remote=True)
    assert [step for step, _ in added(bucket)] == [1, 4]


def test_a_save_that_another_process_carried_is_not_missed(machine: Machine) -> None:
    run = machine.run()
    newest_first = run.handle.journal.line.newest_first
    run.save(make_state(1), step=1)
    machine.carry()
    assert [one.step for one in newest_first()] == [1]
    for step in (2, 3):
        run.save(make_state(step), step=step)
    goes_on = iter([True])
    machine.carrier().carry(lambda: next(goes_on, False))
    assert machine.folder.waiting() == [3]
    assert [one.step for one in newest_first()] == [3, 2, 1]
    machine.carry()
    run.wait(remote=True)
    run.save(make_state(4), step=4)


def test_a_copy_of_a_journal_on_another_machine_is_another_journal(
    tmp_path: Path,
    by_hand: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    bucket = new_backend()
    here, there = (Machine(bucket, tmp_path / name) for name in ("here", "there"))
    ours = here.run()
    for step in (1, 2):
        ours.save(make_state(step), step=step)
    assert "copied or moved" not in caplog.text
    shutil.copytree(here.journal.path, there.journal.path)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(folder_module, "this_machine", lambda: "another one")
        theirs = there.run()
        assert theirs.restore().checkpoint.step == 2
        theirs.save(make_state(33), step=3)
        there.carry()
        assert "copied or moved from another machine" in caplog.text
    for step in (3, 4, 5):
        ours.save(make_state(step), step=step)
    here.carry()
    assert [step for step, _ in added(bucket)] == [1, 2, 3]
    assert_same(there.run().restore().state, make_state(33))
    assert list(here.outcomes().values())[-3:] == ["stranded"] * 3
    with pytest.raises(Stranded):
        ours.save(make_state(6), step=6)


def test_a_journal_that_moved_to_another_machine_is_carried(
    monkeypatch: pytest.MonkeyPatch, machine: Machine, bucket: Backend
) -> None:
    run = machine.run()
    for step in (1, 2):
        run.save(make_state(step), step=step)
    for name in ("second", "third"):
        monkeypatch.setattr(folder_module, "this_machine", lambda name=name: name)
        run = machine.run()
        step = run.restore().checkpoint.step + 1
        run.save(make_state(step), step=step)
    machine.carry()
    assert [step for step, _ in added(bucket)] == [1, 2, 3, 4]


def test_an_id_that_the_journal_has_lost_stands_for_the_machine_that_uses_it() -> None:
    lost, earlier, newest = (digit * ID_DIGITS for digit in "abc")
    log: Any = None  # nothing is read
    scan = LogScan(log, 0, [earlier, newest])
    commit: Any = None
    scan._taken = [
        (slot, TakeOver(token=f"{one}00000000", host="h"), commit)
        for slot, one in enumerate((lost, earlier, newest))
    ]
    takeover = Takeover(token=f"{lost}00000000", slot=0)
    assert [slot for slot, _, _ in scan.foreign(takeover)] == [1]


def test_saves_that_wait_for_a_registry_that_was_here_are_told(
    tmp_path: Path, by_hand: None, caplog: pytest.LogCaptureFixture
) -> None:
    before, after = (Machine(new_backend(), tmp_path / "journal") for _ in range(2))
    before.run().save(make_state(1), step=1)
    before.carry()
    assert after.run().restore() is None
    assert "another registry" not in caplog.text
    before.run().save(make_state(1), step=2)
    assert after.run().restore() is None
    assert "in another registry, and training here does not continue from them: " in caplog.text
    assert before.folder.path in caplog.text


def test_a_pack_that_was_cut_off_is_no_base_of_the_next_save(tmp_path: Path, by_hand: None) -> None:
    machine = Machine(new_backend(), tmp_path / "journal")
    run = machine.run()
    run.save(make_state(1), step=1)
    for pack in Path(machine.folder.states_path(machine.folder.entry(1).write)).glob("packs/*/*"):
        os.truncate(pack, 100)
    run.save(make_state(2), step=2)
    assert_same(machine.run().restore().state, make_state(2))


def test_a_folder_of_another_user_stops_no_restore(
    tmp_path: Path, by_hand: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, listed = str(tmp_path / "journal" / ("0" * 32)), folder_module._listed

    def closed(path: str) -> list[str]:
        if path == theirs:
            raise StorageError("closed", where=path)
        return listed(path)

    machine = Machine(new_backend(), tmp_path / "journal")
    machine.run().save(make_state(1), step=1)
    Path(theirs).mkdir()
    monkeypatch.setattr(folder_module, "_listed", closed)
    assert machine.run().restore().checkpoint.step == 1


def test_a_lost_journal_is_begun_again(machine: Machine, bucket: Backend) -> None:
    machine.run().save(make_state(1), step=1)
    machine.carry()
    shutil.rmtree(machine.journal.path)
    run = machine.run()
    assert run.restore().checkpoint.step == 1
    run.save(make_state(2), step=2)
    machine.carry()
    assert [step for step, _ in added(bucket)] == [1, 2]


def test_states_of_a_save_that_was_not_acknowledged_are_deleted(machine: Machine) -> None:
    machine.run().save(make_state(1), step=1)
    left = Path(machine.folder.states_path("0123456789abcdef"))
    (left / "packs").mkdir(parents=True)
    saving = machine.folder.lock("writing")
    saving.acquire(shared=True)  # another process saves: it may be its own
    machine.carry()
    assert left.exists()
    saving.release()
    machine.carry()
    assert not left.exists()


@pytest.mark.parametrize("name", ["lstat", "listdir"])
def test_a_disk_that_fails_at_a_restore_is_a_typed_error(
    name: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.run().save(make_state(1), step=1)
    again, real = machine.run(), getattr(os, name)

    def fail(path: Any, *args: Any, **options: Any) -> Any:
        if isinstance(path, int) or "/states/" in str(path):
            raise OSError(errno.EIO, "a disk that fails")
        return real(path, *args, **options)

    with monkeypatch.context() as faulty, suppress(StorageError):
        faulty.setattr(os, name, fail)
        assert again.restore().checkpoint.step == 1
    assert machine.run().restore().checkpoint.step == 1
