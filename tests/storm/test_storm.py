"""Pushers, collectors, a pruner and readers, killed at random: nothing acknowledged is lost.

The long ones are run by `sh scripts/soak -n0 tests/storm`. `STORM_SECONDS` lets each of them
last as long as one likes.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest

import holdfast
from tests.storm.aftermath import check, check_alive, check_collected, check_conforms
from tests.storm.contents import identities
from tests.storm.storm import Conditions, Log, Storm
from tests.storm.worker import TRACE
from tests.support.places import PLACES
from tests.support.sometimes import Watch

Tell = Callable[[str, object], None]

#: What is to be done at least. Two cores with ten times as much to do as they can manage it in 30
#: seconds.
_LEAST = {
    "saved": 50,
    "packs reused": 50,
    "packs looked for again": 1,
    "collected": 8,
    "objects collected": 75,
    "evicted": 25,
    "read": 125,
    "kills": 20,
    "stops": 5,
}
_LEAST_IN_A_NIGHT = {what: 10 * least for what, least in _LEAST.items()}
#: The same for 300 seconds where every call is a request.
_LEAST_IN_A_BUCKET = {
    "saved": 100,
    "packs reused": 100,
    "packs looked for again": 2,
    "collected": 8,
    "objects collected": 80,
    "read": 120,
    "kills": 30,
}
#: The same for 60 seconds where a server of Python or JavaScript takes most of the time.
_LEAST_ON_A_SMALL_SERVER = {
    "saved": 20,
    "packs reused": 20,
    "collected": 2,
    "objects collected": 10,
    "read": 20,
    "kills": 10,
}
#: Ends once that is done, so that the other tests have the processors; on a slow machine late.
_CI = Conditions(5, {what: -(-least // 2) for what, least in _LEAST.items()}, longest=30, runs=30)
_NIGHT = Conditions(1200, _LEAST_IN_A_NIGHT, runs=150, pause_s=0.1, delay_s=4, stop_s=(0.3, 15))
_BUCKET = Conditions(
    300, _LEAST_IN_A_BUCKET, runs=50, pause_s=0.3, delay_s=4, kill_s=(0.5, 3), stop_s=(0.3, 10)
)
_SMALL_SERVER = Conditions(
    60,
    _LEAST_ON_A_SMALL_SERVER,
    longest=20,
    runs=20,
    pause_s=0.2,
    kill_s=(0.5, 2),
    stop_s=(0.3, 3),
)
#: The rare places that a short storm is to be at, and a long one.
_SOON = (
    "a commit relies on what another writer put",
    "a lost answer is read back as our own slot",
    "a mark is newer than the observed epoch",
    "a newer log is read after a lost race",
    "another writer has put the manifest",
    "another writer has put the pack",
    "another writer has the slot",
    "the outcome of a slot is unknown",
)
_STORM = (
    *_SOON,
    "a base is damaged or gone",
    "a collection begins at a note",
    "a condemned object is copied",
    "a condemned object is passed over",
    "a mark is met between plan and commit",
    "a run began after the choice",
    "a run is marked already",
    "a run is marked by a newer sweep",
    "a run needs what was condemned",
    "a save repeats a checkpoint",
    "a slot needs the records of evicted checkpoints",
    "a state has moved while it is read",
    "a writer that lost often waits",
    "an object is gone while a change reads it",
    "a state is gone while it is read",
    "a sweep is finished by another collector",
    "lines are composed of the whole history",
    "objects are written again after a sweep",
    "slots that were read need the whole history",
    "two collectors want one epoch",
)


def _weather(
    url: str, folder: Path, conditions: Conditions, tell: Tell, places: Iterable[str]
) -> None:
    """Let a storm pass over a registry, and check what was done and what is left."""
    conditions = _as_long_as_told(conditions)
    holdfast.init(url, skip_race_probe=True).close()
    seeds = identities()
    with Watch(folder / "places", {name: PLACES[name] for name in places}) as watch:
        log = Storm(url, folder / "said", seeds, conditions, watch).blow()
        try:
            assert not log.violations, "\n".join(log.violations)
            check(url, log, seeds)
            steps = check_conforms(url, folder / "said" / TRACE)
            log.counts.update({f"trace: {kind}": count for kind, count in steps.items()})
            check_collected(url, seeds)
            check_alive(url)
        finally:
            _say(log, watch, folder, tell)
        missing = log.missing(conditions.least)
        assert not missing, f"too little was done: {missing}"
        watch.check()


def _as_long_as_told(conditions: Conditions) -> Conditions:
    seconds = float(os.environ.get("STORM_SECONDS", conditions.seconds))
    share = min(1.0, seconds / conditions.seconds)
    least = {what: int(number * share) for what, number in conditions.least.items()}
    return replace(conditions, seconds=seconds, least=least)


def _say(log: Log, watch: Watch, folder: Path, tell: Tell) -> None:
    told = {**log.counts, "refusals": dict(log.refusals), "places": watch.seen}
    for name, value in told.items():
        tell(name, value)
    text = json.dumps(told, indent=1)
    (folder / "counts.json").write_text(text)
    print(text)


@pytest.mark.timeout(1200)
@pytest.mark.xdist_group("storm")
def test_a_storm_in_a_folder_loses_nothing(tmp_path: Path, record_property: Tell) -> None:
    _weather(str(tmp_path / "registry"), tmp_path / "storm", _CI, record_property, _SOON)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.xdist_group("storm")
def test_a_long_storm_in_a_folder_loses_nothing(tmp_path: Path, record_property: Tell) -> None:
    _weather(str(tmp_path / "registry"), tmp_path / "storm", _NIGHT, record_property, _STORM)


@pytest.mark.soak
@pytest.mark.radosgw
@pytest.mark.timeout(3600)
@pytest.mark.xdist_group("storm")
def test_a_storm_in_a_bucket_loses_nothing(
    radosgw_url: Callable[[], str], tmp_path: Path, record_property: Tell
) -> None:
    _weather(radosgw_url(), tmp_path / "storm", _BUCKET, record_property, _SOON)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("server", ["moto_url", "azure_url"])
def test_a_storm_on_a_small_server_loses_nothing(
    server: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    record_property: Tell,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The library of Azure numbers each request by it, under a lock of the whole machine. A process
    # that is stopped there stops all others, and this one would never wake it again.
    monkeypatch.setattr(uuid, "_generate_time_safe", None)
    made = request.getfixturevalue(server)
    url = made() if callable(made) else made
    _weather(url, tmp_path / "storm", _SMALL_SERVER, record_property, ())
