"""A listing reads only the runs that changed: what their summaries hold for."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import pytest

import holdfast
from holdfast.backends import parse
from holdfast.backends.wrappers import Call, Metered, Wrapper
from holdfast.registry.errors import AccessDenied, RegistryError, StoreUnavailable
from holdfast.registry.face import Registry, open_on
from holdfast.registry.history import Made, RunLog, Summaries, commit_line
from holdfast.registry.history.actions import Action, Mark, SetStatus
from holdfast.registry.history.slots import _FEW
from holdfast.registry.objects import (
    ACTIVE,
    NOTES,
    note_key,
    slot_key,
    unwrap_frame,
    wrap_frame,
)
from holdfast.registry.store import Address
from holdfast.registry.store.heads import open_heads
from tests.support.states import small_state

NAMES = ["a", "b", "c"]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    with holdfast.init(tmp_path / "reg", skip_race_probe=True) as reg:
        for name in NAMES:
            reg.create_run(name).save(small_state(), step=1)
    return tmp_path / "reg"


class Listing:
    """A listing by a new process: its rows, the runs that it opened, and its requests."""

    def __init__(self, place: Path, *, form: int = 1, **options: Any) -> None:
        location = parse(place)
        log: list[Call] = []
        meter = Metered(Address(place).open(), log)
        with open_on(meter, heads=open_heads(location)) as reg:
            kept = Summaries(reg.handle.store, reg.handle.store.heads, "rows", form)
            self.opened: list[str] = []
            self.noted: list[str] = []
            with meter.measure() as usage:
                names = reg.run_names()
                self.rows: Mapping[str, Any] = kept.read(
                    names, lambda *one: self._make(reg, *one), **options
                )
            self.calls, self.oldest_ms, self.unasked = usage.calls, kept.oldest_ms, kept.unasked
            parts = [one.key.split("/") for one in log]
            self.asked = {part[1] for part in parts if part[0] == "runs" and len(part) > 2}
            self.tables = sum(one.key.startswith(NOTES) for one in log if one.method == "get")

    def _make(self, reg: Registry, name: str, noted: RunLog | None) -> Made:
        (self.noted if noted else self.opened).append(name)
        log = noted or RunLog(reg.handle.store, name)
        try:
            if not noted:
                log.open()
        except RegistryError as error:
            return Made(error)
        steps = [one.step for one in log.run.checkpoints]
        return Made({"commits": log.run.commits, "steps": steps, "nan": float("nan")}, log)

    @property
    def commits(self) -> dict[str, int]:
        return {name: row["commits"] for name, row in self.rows.items()}


def save(place: Path, name: str) -> None:
    with holdfast.open(place) as reg:
        reg.run(name, create=True).streams["s"].append([{"step": 1}])


def mark(place: Path, name: str, *actions: Action) -> None:
    """Put a mark into a log, as a collection does; and a commit with these actions."""
    (place / "epochs").mkdir(exist_ok=True)
    with holdfast.open(place) as reg:
        log = RunLog(reg.handle.store, name)
        log.open()
        log.append(lambda run: [Mark(epoch=run.epoch + 1)])
        if actions:
            log.append(lambda run: [commit_line(run, actions)])


def test_only_runs_that_changed_are_opened(place: Path) -> None:
    first = Listing(place)
    assert sorted(first.opened) == NAMES
    again = Listing(place)
    assert again.opened == []
    assert again.calls == {"list": 1 + len(NAMES)}  # the names, and one for each run
    assert again.commits == first.commits
    save(place, "b")
    save(place, "new")
    found = Listing(place)
    assert sorted(found.opened) == ["b", "new"]
    assert found.commits == {**first.commits, "b": first.commits["b"] + 1, "new": 2}
    assert list(found.rows) == ["a", "b", "c", "new"]
    assert Listing(place).opened == []


def test_marks_of_a_collection_change_nothing(place: Path) -> None:
    first = Listing(place)
    for _ in range(2):
        mark(place, "a")
    found = Listing(place)
    assert (found.opened, found.commits) == ([], first.commits)
    assert found.calls == {"list": 1 + len(NAMES), "get": 2}
    assert Listing(place).calls == {"list": 1 + len(NAMES)}  # they are not read again
    for _ in range(_FEW):
        mark(place, "c")
    assert Listing(place).opened == []
    mark(place, "a")
    mark(place, "a", SetStatus(status="completed"))
    assert Listing(place).opened == ["a"]
    for _ in range(_FEW + 1):
        mark(place, "b")
    assert Listing(place).opened == ["b"]


def test_young_summaries_take_no_request_and_say_how_old_they_are(place: Path) -> None:
    Listing(place)
    save(place, "a")
    save(place, "new")
    found = Listing(place, max_age_s=3600)
    assert found.opened == ["new"]  # no summary says anything of a run that it does not know
    assert found.commits["a"] == 2  # as it was
    assert found.unasked == len(NAMES)
    with holdfast.open(place) as reg:
        assert Listing(place, max_age_s=3600).calls == {"list": 1}
        assert reg.run("a").manifest.commits == 3
    now = Listing(place)
    assert (now.opened, now.commits["a"], now.oldest_ms) == (["a"], 3, None)
    assert found.oldest_ms is not None


# Sealed runs


MANY = ["a", "b", "c", "d", "e"]
#: The names of the runs, the markers, and the notes.
QUIET = {"list": 3}


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    with holdfast.init(tmp_path / "reg", skip_race_probe=True) as reg:
        reg.upgrade()
        for name in MANY:
            reg.create_run(name).save(small_state(), step=1)
    collect(tmp_path / "reg")
    Listing(tmp_path / "reg")
    return tmp_path / "reg"


def elsewhere(place: Path) -> Registry:
    """Open the registry on a machine whose heads this one does not know."""
    return open_on(Address(place).open())


def collect(place: Path) -> None:
    with elsewhere(place) as reg:
        reg.gc(grace_s=0)


def append(place: Path, name: str) -> None:
    with elsewhere(place) as reg:
        reg.run(name, create=True).streams["s"].append([{"step": 1}])


def commits(place: Path) -> dict[str, int]:
    with elsewhere(place) as reg:
        return {name: reg.run(name).manifest.commits for name in reg.run_names()}


def test_three_listings_tell_of_all_sealed_runs_that_nobody_wrote_to_them(sealed: Path) -> None:
    for _ in range(2):
        found = Listing(sealed)
        assert (found.opened, found.calls, found.commits) == ([], QUIET, commits(sealed))
    with elsewhere(sealed) as reg:
        run = reg.run("b")  # opened before the next seals
        append(sealed, "c")
        append(sealed, "new")
        found = Listing(sealed)
        assert (sorted(found.opened), found.commits) == (["c", "new"], commits(sealed))
        assert found.asked == {"c", "new"}
        append(sealed, "new")  # which was never sealed, so nothing announces it
        assert Listing(sealed).opened == ["new"]
        # The marker is gone again, and the note of the newer seal tells.
        run.streams["s"].append([{"step": 1}])
        collect(sealed)
        assert not list((sealed / "active").iterdir())
        found = Listing(sealed)
        assert (found.opened, found.commits) == (["b"], commits(sealed))
        assert Listing(sealed).calls == QUIET
        run.streams["s"].append([{"step": 2}])
    assert Listing(sealed).opened == ["b"]


@pytest.fixture
def forget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """What makes this machine one that has seen nothing."""
    folders = (str(tmp_path / f"state-{number}") for number in itertools.count())
    return lambda: monkeypatch.setenv("XDG_STATE_HOME", next(folders))


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of notes are not joined."""
    monkeypatch.setattr("holdfast.registry.upkeep.run_notes._JOINED_FROM", 99)


def test_a_fresh_machine_shows_sealed_runs_by_their_notes(
    sealed: Path, forget: Callable[[], None]
) -> None:
    forget()
    append(sealed, "c")
    append(sealed, "new")
    found = Listing(sealed)
    assert (sorted(found.opened), sorted(found.noted)) == (["c", "new"], ["a", "b", "d", "e"])
    assert (found.commits, found.asked, found.tables) == (commits(sealed), {"c", "new"}, 1)
    append(sealed, "e")
    again = Listing(sealed)
    assert (again.opened, again.noted, again.commits) == (["e"], [], commits(sealed))
    collect(sealed)
    Listing(sealed)
    assert Listing(sealed).calls == QUIET


def _overtaken(place: Path) -> None:
    """Put the notes of the first table again, last, as a slow collector does."""
    tables = sorted((place / "notes").iterdir())
    first, rest = unwrap_frame(tables[0].read_bytes(), where="").split(b"\n", 1)
    header = {**json.loads(first), "first": len(tables) + 1}
    content = json.dumps(header, separators=(",", ":")).encode() + b"\n" + rest
    (place / note_key(len(tables) + 1)).write_bytes(wrap_frame(content))


def test_the_note_that_knows_most_slots_counts(
    sealed: Path, apart: None, forget: Callable[[], None]
) -> None:
    append(sealed, "a")
    collect(sealed)
    _overtaken(sealed)
    forget()
    found = Listing(sealed)
    assert (found.opened, {*found.noted}, found.tables) == ([], {*MANY}, 3)
    assert found.commits == commits(sealed)


def test_a_note_that_says_less_than_this_machine_has_seen_is_not_used(
    sealed: Path, apart: None
) -> None:
    append(sealed, "a")
    Listing(sealed)
    for marker in (sealed / "active").iterdir():
        marker.unlink()  # by hand: the note of `a` looks like the newest there is
    for kept in _states():
        kept.unlink()
    found = Listing(sealed)
    assert (found.opened, sorted(found.noted)) == (["a"], MANY[1:])
    assert found.commits == commits(sealed)


def test_notes_that_cost_more_than_the_runs_are_not_read(
    sealed: Path, apart: None, forget: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    append(sealed, "a")
    collect(sealed)
    newest = max((sealed / "notes").iterdir()).stat().st_size
    for most_bytes, tables in ((newest, 1), (newest - len(MANY), 0)):
        forget()
        limit = -(-most_bytes // len(MANY))
        monkeypatch.setattr("holdfast.registry.history.seals._BYTES_FOR_A_RUN", limit)
        found = Listing(sealed)
        assert (sorted(found.opened), found.tables) == (MANY, tables)


@pytest.mark.parametrize(
    ("told", "instead", "is_used"),
    [
        (b'"step":1,', b'"step":"1",', True),
        (b'"n":1,', b'"n":0,', True),
        (b'"commits":2,', b'"commits":0,', False),
        (b'"commits":2,', b'"commits":"2",', False),
        (b'"next_slot":2,', b'"next_slot":1,', False),
        (b'"places":[', b'"holds":[', False),
        (b',"run":{', b',"other":{', False),
    ],
)
def test_a_note_that_does_not_say_what_it_should_costs_time_only(
    sealed: Path, forget: Callable[[], None], told: bytes, instead: bytes, is_used: bool
) -> None:
    (table,) = (sealed / "notes").iterdir()
    content = unwrap_frame(table.read_bytes(), where="")
    assert content.count(told) == len(MANY)
    table.write_bytes(wrap_frame(content.replace(told, instead)))
    forget()
    found = Listing(sealed)
    assert sorted(found.noted if is_used else found.opened) == MANY
    assert (found.asked, found.commits) == ({*MANY}, commits(sealed))
    assert [row["steps"] for row in found.rows.values()] == [[1]] * len(MANY)


def test_a_note_whose_run_is_no_object_costs_time_only(
    sealed: Path, forget: Callable[[], None]
) -> None:
    (table,) = (sealed / "notes").iterdir()
    content = unwrap_frame(table.read_bytes(), where="")
    odd = re.sub(rb',"run":\{.*\}$', b',"run":[{"x":[],"commits":1}]}', content, flags=re.MULTILINE)
    assert odd.count(b"[{") == len(MANY)
    table.write_bytes(wrap_frame(odd))
    forget()
    assert sorted(Listing(sealed).opened) == MANY


def _foreign(place: Path) -> None:
    (place / "active" / "foreign").touch()


def _stranger(place: Path) -> None:
    """Put a table of another registry."""
    newest = max((place / "notes").iterdir())
    content = unwrap_frame(newest.read_bytes(), where="")
    with elsewhere(place) as reg:
        other = content.replace(reg.handle.store.config.id.encode(), b"0" * 32)
    assert other != content
    newest.write_bytes(wrap_frame(other))


def _lost(place: Path) -> None:
    append(place, "e")
    collect(place)
    sorted((place / "notes").iterdir())[-2].unlink()


def _damaged(place: Path) -> None:
    newest = max((place / "notes").iterdir())
    newest.write_bytes(newest.read_bytes()[:-9])


def _older(place: Path) -> None:
    for table in (place / "notes").iterdir():
        table.unlink()


def test_who_may_not_list_the_notes_asks_each_log(sealed: Path) -> None:
    class Partly(Wrapper):
        def list(self, prefix: str = "", **options: Any) -> Any:
            if prefix in (ACTIVE, NOTES):
                raise AccessDenied("no", where=prefix)
            return self.inner.list(prefix, **options)

    append(sealed, "a")
    location = parse(sealed)
    with open_on(Partly(Address(sealed).open()), heads=open_heads(location)) as reg:
        kept = Summaries(reg.handle.store, reg.handle.store.heads, "rows", 1)
        assert set(kept.read(MANY, lambda name, _: Made(name))) == set(MANY)
    assert Listing(sealed).commits == commits(sealed)


@pytest.mark.parametrize("spoil", [_foreign, _lost, _damaged, _older, _stranger])
def test_in_doubt_each_log_is_asked(
    sealed: Path, spoil: Any, apart: None, forget: Callable[[], None]
) -> None:
    append(sealed, "a")
    collect(sealed)
    spoil(sealed)
    found = Listing(sealed)
    assert found.calls["list"] >= 3 + len(MANY)
    assert "a" in found.opened
    assert found.commits == commits(sealed)
    forget()
    first = Listing(sealed)
    assert (sorted(first.opened), first.commits) == (MANY, commits(sealed))


def test_a_run_that_is_given_up_is_not_shown_as_it_was(sealed: Path) -> None:
    (sealed / slot_key("b", 1)).write_bytes(b"garbage")
    with elsewhere(sealed) as reg:
        reg.gc(grace_s=0, forget=["b"])
    assert isinstance(Listing(sealed).rows["b"], RegistryError)


def _shorter(place: Path) -> None:
    (place / slot_key("a", 1)).unlink()


def _later(place: Path) -> None:
    os.utime(place / slot_key("a", 1), (1, 1))


def _longer(place: Path) -> None:
    with (place / slot_key("a", 1)).open("ab") as file:
        file.write(b"x")


def _back(place: Path) -> None:
    """Set the log back to where the listing saw it, after this machine has seen more."""
    before = set((place / slot_key("a", 0)).parent.iterdir())
    save(place, "a")
    for slot in set((place / slot_key("a", 0)).parent.iterdir()) - before:
        slot.unlink()


@pytest.mark.parametrize("change", [_shorter, _later, _longer, _back])
def test_a_log_that_does_not_end_with_the_same_slot_is_opened(place: Path, change: Any) -> None:
    for _ in range(2):  # the second listing learns the time of the slot
        Listing(place)
    change(place)
    found = Listing(place)
    assert found.opened == ["a"]
    assert isinstance(found.rows["a"], RegistryError) == (change is not _later)


def _states() -> Iterator[Path]:
    return Path(os.environ["XDG_STATE_HOME"]).rglob("*.rows")


@pytest.mark.parametrize("damage", ["flip", "empty", "form", "registry"])
def test_a_file_that_does_not_fit_costs_time_only(place: Path, damage: str, tmp_path: Path) -> None:
    first = Listing(place)
    (kept,) = _states()
    if damage == "flip":
        data = bytearray(kept.read_bytes())
        data[len(data) // 2] ^= 1
        kept.write_bytes(bytes(data))
    elif damage == "empty":
        kept.write_bytes(b"")
    elif damage == "registry":
        with holdfast.init(tmp_path / "other", skip_race_probe=True) as reg:
            reg.create_run("a")
        other = Listing(tmp_path / "other")
        (theirs,) = (path for path in _states() if path != kept)
        kept.write_bytes(theirs.read_bytes())
        assert other.commits == {"a": 1}
    found = Listing(place, form=2 if damage == "form" else 1)
    assert sorted(found.opened) == NAMES
    assert found.commits == first.commits
    assert Listing(place, form=2 if damage == "form" else 1).opened == []


def test_a_store_that_does_not_answer_is_an_error(place: Path) -> None:
    class Away(Wrapper):
        def list(self, *arguments: Any, **options: Any) -> NoReturn:
            raise StoreUnavailable("no answer")

    Listing(place)
    location = parse(place)
    with open_on(Away(Address(place).open()), heads=open_heads(location)) as reg:
        kept = Summaries(reg.handle.store, reg.handle.store.heads, "rows", 1)
        with pytest.raises(StoreUnavailable):
            kept.read(NAMES, lambda name, _: Made(name))
