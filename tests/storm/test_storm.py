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
_NIGHT = Conditions(1200, runs=150, pause_s=0.1, delay_s=2, stop_s=(0.3, 15))
_BUCKET = Conditions(300, runs=60, pause_s=0.05, delay_s=2, kill_s=(0.3, 2), stop_s=(0.3, 10))
#: What 60 seconds bring at least, on a machine with two cores that has other things to do.
_LEAST = {
    "saved": 50,
    "packs reused": 50,
    "packs looked for again": 3,
    "collected": 10,
    "objects collected": 100,
    "evicted": 25,
    "read": 120,
    "kills": 25,
    "stops": 10,
}


def _weather(url: str, folder: Path, conditions: Conditions, tell: Tell) -> None:
    """Let a storm pass over a registry, and check what was done and what is left."""
    conditions = replace(
        conditions, seconds=float(os.environ.get("STORM_SECONDS", conditions.seconds))
    )
    registry.init(url, skip_race_probe=True).close()
    seeds = identities()
    log = Storm(url, folder, seeds, conditions).blow()
    try:
        assert not log.violations, "\n".join(log.violations)
        check(url, log, seeds)
        check_collected(url, seeds)
    finally:
        _say(log, folder, tell)
    _check_least(log.counts, min(1.0, conditions.seconds / _CI.seconds))


def _say(log: Log, folder: Path, tell: Tell) -> None:
    told = {**log.counts, "refusals": dict(log.refusals)}
    for name, value in told.items():
        tell(name, value)
    text = json.dumps(told, indent=1)
    (folder / "counts.json").write_text(text)
    print(text)


def _check_least(counts: Mapping[str, int], share: float) -> None:
    missed = {
        what: counts[what] for what, least in _LEAST.items() if counts[what] < int(least * share)
    }
    assert not missed, f"too little was done: {missed}"


@pytest.mark.timeout(1200)
@pytest.mark.xdist_group("storm")
def test_a_storm_in_a_folder_loses_nothing(tmp_path: Path, record_property: Tell) -> None:
    _weather(str(tmp_path / "registry"), tmp_path / "said", _CI, record_property)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.xdist_group("storm")
def test_a_long_storm_in_a_folder_loses_nothing(tmp_path: Path, record_property: Tell) -> None:
    _weather(str(tmp_path / "registry"), tmp_path / "said", _NIGHT, record_property)


@pytest.mark.soak
@pytest.mark.radosgw
@pytest.mark.timeout(3600)
@pytest.mark.xdist_group("storm")
def test_a_storm_in_a_bucket_loses_nothing(
    radosgw_url: Callable[[], str], tmp_path: Path, record_property: Tell
) -> None:
    _weather(radosgw_url(), tmp_path / "said", _BUCKET, record_property)
