"""The power goes: every name of a folder that was not synced is lost, whoever made it.

A process dies between a name and the sync of its folder. The next one sees the name, builds on it
or says that there is nothing left to do, and is believed. Then the power goes: whatever was
acknowledged is still there, and the registry is sound.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import Retention
from holdfast.backends.local.backend import LocalBackend
from holdfast.backends.wrappers import InjectedCrash
from holdfast.registry.face.registry import Registry
from holdfast.registry.store.store import create_config
from tests.crash.courses import check_sound, uninterrupted
from tests.crash.disk import Disk
from tests.crash.scenarios import AGAIN, LIVES, PUSHES, SYNCS, Scenario, collect, reopened
from tests.registry.deriving.transitions import world as transitions
from tests.support.loads import check_verified
from tests.support.pictures import RUN, picture_of_runs
from tests.support.states import make_state
from tests.support.stores import Scratch, contents, new_backend, opened

# What the other tests of crashes do not do: acknowledgments of every other kind.


def _two_saves(registry: Registry) -> None:
    run = registry.run(RUN, create=True, seed=7)
    for step in (1, 2):
        run.save(make_state(step), step=step, metrics={"loss": 1 / step})


def _released(registry: Registry) -> None:
    _two_saves(registry)
    run = reopened(registry)
    for number, checkpoint in enumerate(run.checkpoints()):
        run.releases.publish(f"1.{number}.0", checkpoint, card={"name": "it"}, only=["model"])


def _publish(registry: Registry, _: object) -> None:
    run = reopened(registry)
    run.releases.publish("1.0.0", run.latest(), card={"name": "it"}, only=["model"])


def _roll_back(registry: Registry, _: object) -> None:
    reopened(registry).releases.rollback("1.0.0")


def _promote(registry: Registry, _: object) -> None:
    run = reopened(registry)
    run.pool.promote(run.latest())


def _promoted(registry: Registry) -> None:
    _two_saves(registry)
    _promote(registry, None)


def _record_a_match(registry: Registry, _: object) -> None:
    reopened(registry).pool.record_match([None, 1], [1, 2], match="final")


def _append(registry: Registry, _: object) -> None:
    stream = reopened(registry).streams["losses"]
    stream.append([{"step": 1, "loss": 0.5}], lifetime="resettable")


def _appended(registry: Registry) -> None:
    _two_saves(registry)
    _append(registry, None)


def _archive(registry: Registry, _: object) -> None:
    reopened(registry).streams["losses"].archive("first")


def _merge(registry: Registry, _: object) -> None:
    run = reopened(registry)
    two = [ck for ck in run.checkpoints() if ck.step <= 2]
    run.exchange.merge(two, step=3, average=["model"], pick={"optimizer": two[0], "step": two[0]})


def _set_status(registry: Registry, _: object) -> None:
    reopened(registry).status = "completed"


def _watch(registry: Registry, _: object) -> None:
    for _ck in reopened(registry).follow.checkpoints(group="eval", follow=False):
        pass


def _create(registry: Registry, _: object) -> None:
    registry.run(RUN, create=True, seed=7)


def _go_over(registry: Registry, _: object) -> None:
    transitions.over(registry.run(transitions.RUN))


def _half_dead(registry: Registry) -> None:
    """Leave packs of which something is still needed."""
    run = registry.run(RUN, create=True, seed=7)
    for step in (1, 2):
        run.save(make_state(step), step=step)
    run.retention.prune(Retention(last=1))


def _repack(registry: Registry, _: object) -> None:
    registry.repack(min_dead=0.01)


OTHERS = [
    Scenario("create", _create),
    Scenario("publish", _publish, _two_saves),
    Scenario("roll back", _roll_back, _released),
    Scenario("promote", _promote, _two_saves),
    Scenario("match", _record_a_match, _promoted),
    Scenario("append", _append, _two_saves),
    Scenario("archive", _archive, _appended),
    Scenario("merge", _merge, _two_saves),
    Scenario("set status", _set_status, _two_saves),
    Scenario("watch", _watch, _two_saves),
    Scenario("transition", _go_over, transitions.lived, run=transitions.RUN),
    Scenario("repack", _repack, _half_dead),
]
#: Programs that look whether another one has done it, and then do not even say that they know.
LOOKS_FIRST = ("save after rewind", "undo", "fork", "untag", "undrop")
SCENARIOS = [one for one in (*PUSHES, *LIVES, *SYNCS, *OTHERS) if not one.interrupt_source]


# Who dies does one thing, and who comes after it another.


def _save_elsewhere(registry: Registry, _: object) -> None:
    registry.run("other", create=True, seed=8).save(make_state(3), step=3)


def _save_next(registry: Registry, _: object) -> None:
    run = reopened(registry)
    run.restore()
    run.save(make_state(3), step=3)


def _evict(registry: Registry, _: object) -> None:
    reopened(registry).retention.prune(Retention(last=1))


def _drop(registry: Registry, _: object) -> None:
    reopened(registry).retention.drop("a mistake", now=True)


def _evicted(registry: Registry) -> None:
    _two_saves(registry)
    _evict(registry, None)


def _evicted_and_upgraded(registry: Registry) -> None:
    _evicted(registry)
    registry.upgrade()


def _tag_the_first(registry: Registry, _: object) -> None:
    run = reopened(registry)
    run.pins.tags.set("first", run.checkpoints()[0])


def _fork(registry: Registry, _: object) -> None:
    registry.fork(f"{RUN}/latest", "fork")


PAIRS = {
    "the same content in another run": (_two_saves, _save_elsewhere, _save_next),
    "a collector behind an eviction": (_two_saves, _evict, collect),
    "a collector behind a drop": (_two_saves, _drop, collect),
    "a save behind a collector": (_evicted, collect, _save_next),
    "a save behind a collector after an upgrade": (_evicted_and_upgraded, collect, _save_next),
    "a fork behind a save": (_two_saves, _save_next, _fork),
    "a save behind a tag": (_two_saves, _tag_the_first, _save_next),
    "a save behind a repack": (_half_dead, _repack, _save_next),
    "a collector behind a repack": (_half_dead, _repack, collect),
    "a note behind a save": (_two_saves, _save_next, collect),
}


class Site:
    """A registry on a disk whose power fails: made ready once, and set back as often as wanted."""

    def __init__(self, place: Path, patch: pytest.MonkeyPatch) -> None:
        self.root = place / "disk" / "registry"
        self.root.parent.mkdir()
        self._template = place / "template"
        self.disk = Disk(self.root.parent, patch)

    def prepare(self, prepare: Callable[[Registry], object]) -> None:
        backend = LocalBackend(self.root)
        create_config(backend, "skipped")
        with opened(backend) as registry:
            prepare(registry)
        shutil.copytree(self.root, self._template)

    def set_back(self) -> None:
        shutil.rmtree(self.root)
        shutil.copytree(self._template, self.root)
        self.disk.settle()

    def act(self, scenario: Scenario, dies_at: int = 0, *, resumed: bool = False) -> None:
        """Let a process of its own do something, and die at an event of it."""
        with opened(LocalBackend(self.root)) as registry:
            begin = scenario.resume if resumed and scenario.resume else scenario.begin
            begun = begin(registry)
            self.disk.restart()
            self.disk.dies_at = dies_at
            try:
                with suppress(InjectedCrash):
                    scenario.act(registry, begun)
            finally:
                with suppress(InjectedCrash):
                    registry.close()
        ended = self.disk.events
        assert not dies_at or ended == dies_at
        self.disk.dies_at = 0

    def points(self, scenario: Scenario, *, every: bool) -> list[int]:
        """Return the events at which a process may die.

        Args:
            scenario: What it does.
            every: All of them; without it one sync of each kind of folder.
        """
        self.set_back()
        self.act(scenario)
        if every:
            return list(range(1, self.disk.events + 1))
        kinds = {}
        for event, folder in self.disk.syncs.items():
            parts = Path(os.path.relpath(folder, self.root)).parts
            kinds[parts[:1], len(parts)] = event
        return list(kinds.values())

    @property
    def seen(self) -> Scratch:
        """What a process sees, whatever a loss of power would leave."""
        store = Scratch()
        for key, data in contents(LocalBackend(self.root)).items():
            store.put(key, data)
        return store


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(tmp_path, monkeypatch)


def check_kept(site: Site, but: str = "") -> None:
    """Check that what is acknowledged by now outlives the power, whichever names go with it.

    Args:
        site: Where.
        but: A run of which nothing was acknowledged.
    """
    shown = {name: run for name, run in picture_of_runs(site.seen).items() if name != but}
    known: list[dict[str, bytes]] = []
    for lost in (None, *site.disk.pending):
        left = site.disk.survivors(site.root, lost)
        if contents(left) in known:
            continue
        known.append(contents(left))
        found = {name: run for name, run in picture_of_runs(left).items() if name != but}
        assert found == shown, lost
        with opened(left) as registry:
            check_verified(registry, lost)


def check_pair(site: Site, first: Scenario, then: Scenario, *, every: bool, but: str = "") -> int:
    points = site.points(first, every=every)
    for point in points:
        site.set_back()
        site.act(first, point)
        site.act(then, resumed=True)
        check_kept(site, but)
    return len(points)


#: Each is one commit, as `tag` is: the same syncs.
ONE_COMMIT = (
    *("roll back", "promote", "match", "append", "archive", "set status", "watch"),
    *("untag", "prune", "undo", "publish", "merge"),
)
#: Each does what `later save`, `collect` or `sync to fresh` does, behind something else.
BEHIND = (
    *("save after rewind", "save with everything", "save behind a seal", "sync to half"),
    *("collect by notes", "seal", "a save behind a collector after an upgrade"),
    *("a save behind a tag", "a note behind a save", "a collector behind a drop"),
)


def _with_every(names: list[Any]) -> list[Any]:
    soak = pytest.mark.soak
    syncs = [
        pytest.param(
            name,
            False,
            id=str(name),
            marks=[soak] if str(name) in AGAIN + ONE_COMMIT + BEHIND else [],
        )
        for name in names
    ]
    return syncs + [pytest.param(n, True, id=f"{n}, every event", marks=soak) for n in names]


@pytest.mark.parametrize(
    ("scenario", "every"),
    # A run that was dropped is no longer written to: nobody says anything of it again.
    _with_every([scenario for scenario in SCENARIOS if scenario.name not in ("drop", "drop now")]),
)
def test_who_repeats_what_another_left_unsynced_has_it_for_good(
    scenario: Scenario, every: bool, site: Site
) -> None:
    site.prepare(scenario.prepare)
    again = scenario
    if scenario.name in LOOKS_FIRST:

        def act(registry: Registry, begun: object) -> None:
            scenario.act(registry, begun)
            registry.run(scenario.run).status = "running"

        again = replace(scenario, act=act)
    assert check_pair(site, scenario, again, every=every)


@pytest.mark.parametrize(("name", "every"), _with_every(list(PAIRS)))
def test_who_builds_on_what_another_left_unsynced_has_it_for_good(
    name: str, every: bool, site: Site
) -> None:
    prepare, first, then = PAIRS[name]
    site.prepare(prepare)
    elsewhere = "other" if first is _save_elsewhere else ""
    dies = Scenario("dies", first)
    assert check_pair(site, dies, Scenario(name, then), every=every, but=elsewhere)


def test_a_registry_that_its_maker_left_unsynced_is_kept(site: Site) -> None:
    above = site.root.parent / "deep"
    site.root = above / "registry"
    site.disk.settle()

    def make(dies_at: int = 0) -> int:
        site.disk.restart()
        site.disk.dies_at = dies_at
        with suppress(InjectedCrash):
            holdfast.init(site.root, skip_race_probe=True).close()
        site.disk.dies_at = 0
        return site.disk.events

    for point in range(1, make() + 1):
        shutil.rmtree(above, ignore_errors=True)
        site.disk.settle()
        assert make(point) == point
        if not (site.root / "registry.json").exists():
            make()
        site.act(Scenario("save", _save_elsewhere))
        check_kept(site)


def test_a_sync_brings_nothing_that_its_source_can_still_lose(site: Site) -> None:
    """Or the source's next commit would be another one, and the two would have diverged."""
    site.prepare(_two_saves)
    save = Scenario("save", _save_next)
    for point in site.points(save, every=False):
        site.set_back()
        site.act(save, point)
        mirror = new_backend()
        with opened(LocalBackend(site.root)) as source, opened(mirror) as registry:
            holdfast.sync(source, registry)
        left = site.disk.survivors(site.root)
        assert picture_of_runs(left) == picture_of_runs(mirror)
        with opened(left) as source, opened(mirror) as registry:
            _save_next(source, None)
            holdfast.sync(source, registry)


# The power goes while somebody writes


@pytest.mark.parametrize(("scenario", "every"), _with_every(SCENARIOS))
def test_the_power_may_go_at_any_moment(scenario: Scenario, every: bool, site: Site) -> None:
    """Nothing that was acknowledged before is lost, and nothing half done is visible."""
    site.prepare(scenario.prepare)
    points = site.points(scenario, every=every)
    course = uninterrupted(scenario, lambda: _copy_of(site))
    known: list[dict[str, bytes]] = []
    for point in (*points, 0):  # and once to its end
        site.set_back()
        site.act(scenario, point)
        for lost in (None, *site.disk.pending):
            left = site.disk.survivors(site.root, lost)
            if contents(left) not in known:
                known.append(contents(left))
                check_sound(scenario, left, course)
    assert len(known) > 1


def _copy_of(site: Site) -> LocalBackend:
    site.set_back()
    return LocalBackend(site.root)
