"""`preset`; `ls` and `show` are tested beside the runs that begin with them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.registry.spec.presets import preset_names
from tests.registry.cli.calling import Call

OWN = """
name = "own"
required_keys = ["model", "config | settings"]
finite = ["model/*"]
dtypes = [{ path = "*/exp_avg", dtype = "float32" }]
inference = ["model"]

[[phases]]
name = "warm"
save_every = 10
monitors = [{ metric = "loss", mode = "min" }]
retention = { last = 3, best = 1 }

[[phases]]
name = "fine"
counter = "epoch"
tiers = [
    { name = "kept", every = 5, retention = { all = true } },
    { name = "rest", retention = { last = 2, for_days = 7 } },
]
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "own.toml").write_text(OWN)
    return tmp_path / "own.toml"


def test_a_good_file(call: Call, call_json: Callable[..., Any], own: Path) -> None:
    checked = call("preset", own)
    header, warm, fine, end = checked.stdout.splitlines()
    assert header.split() == ["phase", "counter", "save_every", "monitors", "keeps"]
    assert warm.split(maxsplit=4) == ["warm", "step", "10", "loss:min", "last 3, best 1"]
    assert fine.split(maxsplit=3) == ["fine", "epoch", "-", "kept: all; rest: last 2, days 7"]
    assert end == "ok: own, 2 declared phases"
    assert checked.stderr == ""
    shape = call_json("preset", own)
    assert set(shape) == {"name", "about", "phases", "warnings"}
    assert shape["warnings"] == []
    assert shape["phases"][1] == {
        "name": "fine",
        "counter": "epoch",
        "save_every": None,
        "monitors": [],
        "keeps": {"kept": "all", "rest": "last 2, days 7"},
    }


def test_a_wrong_file(call: Call, own: Path) -> None:
    own.write_text(OWN.replace("save_every", "save_evry"))
    refused = call("preset", own, status=3)
    assert "phase warm: no field 'save_evry' (did you mean 'save_every'?)" in refused.stderr
    assert "hint: docs/presets.md explains every field." in refused.stderr
    assert refused.stdout == ""


@pytest.mark.parametrize(
    ("good", "slip", "warning"),
    [
        (
            '"model/*"',
            '"model"',
            "finite: 'model' matches no path below this key; 'model/",
        ),
        ('"model/*"', '"modle/*"', "finite: no state must have 'modle'.* Did you mean 'model'"),
        ('"*/exp_avg"', '"optim/*"', "dtypes: no state must have 'optim', which required_keys"),
        ('inference = ["model"', 'inference = ["model/*"', "inference: 'model/[*]' is a pattern"),
        ('inference = ["model"', 'inference = ["modl"', "inference: no state must have 'modl'"),
        ('["model", ', '["model", "a/b", ', "required_keys: 'a/b' is a pattern"),
    ],
)
def test_what_may_be_a_slip(
    good: str, slip: str, warning: str, call: Call, call_json: Callable[..., Any], own: Path
) -> None:
    own.write_text(OWN.replace(good, slip))
    checked = call("preset", own)
    (line,) = checked.stderr.splitlines()
    assert re.match(f"warning: {warning}", line)
    assert call_json("preset", own)["warnings"] == [line.removeprefix("warning: ")]


@pytest.mark.parametrize("name", preset_names())
def test_what_is_shipped_has_no_slips(name: str, call: Call) -> None:
    assert call("preset", name).stderr == ""
