"""Pushers, collectors, a pruner and readers, killed at random: nothing acknowledged is lost.

The long ones are run by hand: `pytest -n0 -m soak tests/storm`. `STORM_SECONDS` lets each of them
last as long as one likes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

import registry
from tests.storm.aftermath import check, check_collected
from tests.storm.contents import identities
from tests.storm.storm import Conditions, Log, Storm

Tell = Callable[[str, object], None]

_CI = Conditions(60)
_NIGHT = Conditions(1200, runs=150, pause_s=0.1, delay_s=4, stop_s=(0.3, 15))
_BUCKET = Conditions(300, runs=50, pause_s=0.3, delay_s=4, kill_s=(0.5, 3), stop_s=(0.3, 10))
#: What 60 seconds bring at least, on two cores that have much else to do.
_LEAST = {
    "saved": 35,
    "packs reused": 35,
    "packs looked for again": 1,
    "collected": 12,
    "objects collected": 70,
    "evicted": 20,
    "read": 90,
    "kills": 25,
    "stops": 10,
}
_LEAST_IN_A_NIGHT = {what: 5 * least for what, least in _LEAST.items()}
#: What 300 seconds bring at least where every call is a request.
_LEAST_IN_A_BUCKET = {
    "saved": 80,
    "collected": 4,
    "objects collected": 60,
    "read": 100,
    "kills": 25,
}


def _weather(
    url: str, folder: Path, conditions: Conditions, least: Mapping[str, int], tell: Tell
) -> None:
    """Let a storm pass over a registry, and check what was done and what is left."""
    seconds = float(os.environ.get("STORM_SECONDS", conditions.seconds))
    share = min(1.0, seconds / conditions.seconds)
    conditions = replace(conditions, seconds=seconds)
    registry.init(url, skip_race_probe=True).close()
    seeds = identities()
    log = Storm(url, folder, seeds, conditions).blow()
    try:
        assert not log.violations, "\n".join(log.violations)
        check(url, log, seeds)
        check_collected(url, seeds)
    finally:
        _say(log, folder, tell)
    missed = {what: log.counts[what] for what in least if log.counts[what] < least[what] * share}
    assert not missed, f"too little was done: {missed}"


def _say(log: Log, folder: Path, tell: Tell) -> None:
    told = {**log.counts, "refusals": dict(log.refusals)}
    for name, value in told.items():
        tell(name, value)
    text = json.dumps(told, indent=1)
    (folder / "counts.json").write_text(text)
    print(text)


@pytest.mark.timeout(1200)
@pytest.mark.xdist_group("storm")
def test_a_storm_in_a_folder_loses_nothing(tmp_path: Path, record_property: Tell) -> None:
    _weather(str(tmp_path / "registry"), tmp_path / "said", _CI, _LEAST, record_property)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.xdist_group("storm")
def test_a_long_storm_in_a_folder_loses_nothing(tmp_path: Path, record_property: Tell) -> None:
    _weather(
        str(tmp_path / "registry"), tmp_path / "said", _NIGHT, _LEAST_IN_A_NIGHT, record_property
    )


@pytest.mark.soak
@pytest.mark.radosgw
@pytest.mark.timeout(3600)
@pytest.mark.xdist_group("storm")
def test_a_storm_in_a_bucket_loses_nothing(
    radosgw_url: Callable[[], str], tmp_path: Path, record_property: Tell
) -> None:
    _weather(radosgw_url(), tmp_path / "said", _BUCKET, _LEAST_IN_A_BUCKET, record_property)
