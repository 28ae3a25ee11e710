"""The alarm rules of examples/night, read and tried by Prometheus itself: each fires, and is quiet.

A case gives series of an hour or of days, and at some moments the alarms that fire; all others must
be quiet then.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

RULES = Path(__file__).parents[2] / "examples" / "night" / "alarms.yaml"
STEPS = ("prune", "gc", "repack", "verify")


class Piece(NamedTuple):
    """A part of a series: its value at first, how long, and by how much it grows a minute."""

    value: float | None  # `None`: it is not there
    span: str
    grows: float = 0


Series = Mapping[str, Sequence[Piece]]
Fires = Mapping[str, Mapping[str, list[dict[str, str]]]]


class Case(NamedTuple):
    """Series, and which alarms fire when: each alarm with the labels of its series."""

    series: Series
    fires: Fires
    every: int = 30  # minutes


def minutes(span: str) -> int:
    return int(span[:-1]) * {"m": 1, "h": 60, "d": 1440}[span[-1]]


def cared(*nights: Piece) -> Series:
    """Return the times of the steps of care."""
    return {f'care_timestamp_seconds{{step="{one}"}}': nights for one in STEPS}


NIGHTS = [Piece(day * 86400, "1d") for day in range(4)]
#: With it the alarm that misses all metrics of care is quiet.
CARED = cared(*NIGHTS)
FAILED = 'saves_total{outcome="failed"}'
CARE_FAILED = 'failures_total{error="StoreFull",within="care"}'
ONE: list[dict[str, str]] = [{}]

CASES = {
    "a quiet week of four days": Case(
        {
            **CARED,
            FAILED: [Piece(3, "4d")],
            'saves_total{outcome="saved"}': [Piece(0, "4d", 1)],
            "saved_timestamp_seconds": [Piece(0, "4d", 60)],
            "save_blocked_seconds_total": [Piece(0, "4d", 5)],
            "journal_oldest_timestamp_seconds": [Piece(0, "4d", 60)],
            "journal_waiting_bytes": [Piece(49e9, "4d")],
            'journal_outside_saves{outcome="refused"}': [Piece(0, "4d")],
            "follower_oldest_timestamp_seconds": [Piece(0, "4d", 60)],
            "hub_broken_answers_total": [Piece(0, "4d", 0.5)],
            CARE_FAILED: [Piece(1, "4d")],
            "damaged_findings": [Piece(0, "4d")],
            "verified_timestamp_seconds": NIGHTS,
            'mirror_synced_timestamp_seconds{mirror="1"}': NIGHTS,
            "dead_bytes": [Piece(0.9e12, "4d")],
        },
        {"25h": {}, "2d": {}, "90h": {}},  # at first, what was counted before looks new
    ),
    "saves fail": Case(
        {**CARED, FAILED: [Piece(None, "10h"), Piece(1, "3h"), Piece(2, "3h")]},
        {
            "9h": {},
            "630m": {"SavesFail": [{"outcome": "failed"}]},
            "12h": {},
            "810m": {"SavesFail": [{"outcome": "failed"}]},
            "15h": {},
        },
    ),
    "a gap is no new failure": Case(
        {
            **CARED,
            FAILED: [Piece(1, "33h"), Piece(None, "3h"), Piece(1, "30h")],
            CARE_FAILED: [Piece(1, "33h"), Piece(None, "3h"), Piece(1, "30h")],
        },
        {"26h": {}, "36h": {}, "58h": {}},
    ),
    "nothing is saved": Case(
        {**cared(*NIGHTS, Piece(4 * 86400, "5d")), "saved_timestamp_seconds": [Piece(3600, "9d")]},
        {
            "6h": {},
            "8h": {"NothingSaved": ONE},
            "5d": {"NothingSaved": ONE},
            "170h": {"NotCaredFor": [{"step": one} for one in STEPS]},
        },
    ),
    "saves stop the training": Case(
        {**CARED, "save_blocked_seconds_total": [Piece(0, "3h", 9), Piece(1620, "2h")]},
        {"25m": {}, "2h": {"TrainingWaits": ONE}, "4h": {}},
        every=5,
    ),
    "the journal is behind, full and stuck": Case(
        {
            **CARED,
            "journal_oldest_timestamp_seconds": [Piece(0, "2h")],
            "journal_waiting_bytes": [Piece(0, "1h"), Piece(51e9, "1h")],
            'journal_outside_saves{outcome="stranded"}': [Piece(0, "80m"), Piece(1, "40m")],
        },
        {
            "50m": {},
            "65m": {"JournalFull": ONE},
            "75m": {"JournalFull": ONE, "JournalBehind": ONE},
            "90m": {
                "JournalFull": ONE,
                "JournalBehind": ONE,
                "JournalStuck": [{"outcome": "stranded"}],
            },
            "130m": {},
        },
        every=5,
    ),
    "a follower is behind, answers break": Case(
        {
            **CARED,
            "follower_oldest_timestamp_seconds": [Piece(0, "3h"), Piece(None, "1h")],
            "hub_broken_answers_total": [Piece(0, "2h", 1), Piece(120, "3h")],
        },
        {
            "20m": {},
            "1h": {"AnswersBreak": ONE},
            "125m": {"FollowerBehind": ONE, "AnswersBreak": ONE},
            "4h": {},
        },
        every=5,
    ),
    "an engine does not take the weights": Case(
        {
            **CARED,
            'engine_failures_total{engine="0"}': [
                Piece(0, "1h"),
                Piece(0, "30m", 1),
                Piece(30, "2h"),
            ],
        },
        {"50m": {}, "80m": {"EngineFails": [{"engine": "0"}]}, "3h": {}},
        every=5,
    ),
    "no care": Case({}, {"47h": {}, "49h": {"CareAbsent": ONE}}),
    "care ended": Case(
        cared(Piece(0, "3d")), {"2d": {}, "50h": {"NotCaredFor": [{"step": one} for one in STEPS]}}
    ),
    "one step has never ended": Case(
        {name: times for name, times in CARED.items() if "verify" not in name},
        {"47h": {}, "49h": {"NotCaredFor": ONE}, "95h": {"NotCaredFor": ONE}},
    ),
    "a step ends at last": Case(
        {
            **CARED,
            'care_timestamp_seconds{step="verify"}': [Piece(None, "50h"), Piece(180000, "44h")],
        },
        {"49h": {"NotCaredFor": ONE}, "51h": {}},
    ),
    "a step of care fails": Case(
        {**CARED, CARE_FAILED: [Piece(None, "30h"), Piece(1, "2d"), Piece(2, "2h")]},
        {
            "29h": {},
            "31h": {"CareFails": [{"error": "StoreFull", "within": "care"}]},
            "56h": {},
            "79h": {"CareFails": [{"error": "StoreFull", "within": "care"}]},
        },
    ),
    "damage, no verification, a mirror behind, dead bytes": Case(
        {
            **CARED,
            "damaged_findings": [Piece(0, "1d"), Piece(2, "3d")],
            "verified_timestamp_seconds": [Piece(0, "4d")],
            'mirror_synced_timestamp_seconds{mirror="2"}': [Piece(0, "4d")],
            "dead_bytes": [Piece(0, "1d"), Piece(2e12, "3d")],
        },
        {
            "23h": {},
            "25h": {"Damaged": ONE},
            "49h": {"Damaged": ONE, "MirrorBehind": [{"mirror": "2"}]},
            "73h": {
                "Damaged": ONE,
                "MirrorBehind": [{"mirror": "2"}],
                "NotVerified": ONE,
                "DeadBytes": ONE,
            },
        },
    ),
}


def rules() -> dict[str, Any]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def in_words(pieces: Sequence[Piece], every: int) -> str:
    """Return a series as promtool takes it: `0+60x9` are ten values."""
    words = []
    for one in pieces:
        count = minutes(one.span) // every
        grows = f"{one.value or 0:.0f}+{one.grows * every:g}x{count - 1}"
        words.append(f"_x{count}" if one.value is None else grows)
    return " ".join(words)


def as_promtool(case: Case) -> dict[str, Any]:
    """Return a case in promtool's form: at each moment every alarm of the file is looked at."""
    series = [
        {"series": f"holdfast_{name}", "values": in_words(pieces, case.every)}
        for name, pieces in case.series.items()
    ]
    looks = [
        {
            "eval_time": moment,
            "alertname": name,
            "exp_alerts": [
                {"exp_labels": {**labels, **rule["labels"]}, "exp_annotations": rule["annotations"]}
                for labels in fires.get(name.removeprefix("Holdfast"), [])
            ],
        }
        for moment, fires in case.fires.items()
        for name, rule in rules().items()
    ]
    return {"interval": f"{case.every}m", "input_series": series, "alert_rule_test": looks}


def test_prometheus_reads_the_rules_and_each_alarm_fires_and_is_quiet(tmp_path: Path) -> None:
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool is not installed: the rules are not tried by Prometheus")
    fired = {name for case in CASES.values() for fires in case.fires.values() for name in fires}
    assert {f"Holdfast{name}" for name in fired} == set(rules())
    asked = [["check", "rules", str(RULES)]]
    for every in {case.every for case in CASES.values()}:
        tests = [as_promtool(case) for case in CASES.values() if case.every == every]
        given = {"rule_files": [str(RULES)], "evaluation_interval": f"{every}m", "tests": tests}
        file = tmp_path / f"{every}.json"
        file.write_text(json.dumps(given))
        asked.append(["test", "rules", str(file)])
    for words in asked:
        done = subprocess.run([tool, *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
