"""Presets: those that are shipped, those that users write, and what is told of wrong ones."""

from __future__ import annotations

import pytest

from registry import Monitor
from registry.errors import InvalidInput, NotFound
from registry.presets import load_preset, preset_names
from registry.spec import Retention

OWN = """
name = "own"
required_keys = ["model"]

[[phases]]
name = "warmup"
save_every = 10
monitors = [{ metric = "mu - 3*sigma", mode = "max", name = "skill" }]

[[phases.tiers]]
name = "kept"
every = 100
improves = ["skill"]
retention = { all = true }

[[phases.tiers]]
name = "rolling"
retention = { last = 2 }
"""


@pytest.mark.parametrize("name", preset_names())
def test_every_shipped_preset_can_be_read_and_says_what_it_is(name):
    preset = load_preset(name)
    assert preset.name == name
    assert preset.about


def test_the_default_is_among_them():
    assert "default" in preset_names()
    assert load_preset("default").retention == Retention(last=3, best=1, every=10_000, wait=3)


def test_a_file_of_ones_own(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(OWN)
    for given in (path, str(path)):
        (phase,) = load_preset(given).phases
        assert phase.monitors == (Monitor(metric="mu - 3*sigma", mode="max", name="skill"),)
        assert [(tier.name, tier.every, tier.improves) for tier in phase.tiers] == [
            ("kept", 100, ("skill",)),
            ("rolling", None, ()),
        ]


WRONG = {
    "no TOML": ("name = ", "not a preset; expected TOML; found Invalid value"),
    "a key twice": ("name = 'a'\nname = 'b'", "not a preset.*expected TOML"),
    "an unknown key": ("nmae = 'a'", "breaks the rules of presets.*nmae: Extra inputs"),
    "a wrong type": ("name = 5", "breaks the rules of presets.*name: Input should be a valid str"),
    "an unknown format": ('format = "holdfast.preset/9"', "format: Input should be 'holdfast"),
    "a date": ("about = 2026-01-01", "breaks the rules of presets.*not JSON serializable"),
    "an infinite number": (
        "[[phases]]\nname='1'\nsave_every = inf",
        r"breaks the rules of presets",
    ),
    "an empty policy": ("retention = {}", "retention: .*empty: it would keep nothing"),
    "a contradictory policy": (
        "retention = { all = true, last = 1 }",
        "retention: .*contradictory: `all` keeps everything",
    ),
    "a wrong number of a policy": (
        "retention = { last = 0 }",
        "retention: .*last: not a retention policy",
    ),
    "a monitor without a mode": (
        'monitors = [{ metric = "loss" }]',
        r"monitors\.0: .*not a monitor",
    ),
    "best without a monitor": ("retention = { best = 1 }", "the best are kept"),
    "a phase twice": (
        "[[phases]]\nname = '1'\n[[phases]]\nname = '1'",
        "the file: .*phase 1 is declared twice",
    ),
    "a gate of no phase": (
        "gates = [{ name = 'g', phase = '2' }]\n[[phases]]\nname = '1'",
        "gate of phase 2: not declared",
    ),
    "a wrong phase": (
        "[[phases]]\nname = '1'\nsave_every = 0",
        r"phases\.0\.save_every: Input should be greater",
    ),
}


@pytest.mark.parametrize(("text", "told"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_file_is_refused_and_told_where(tmp_path, text, told):
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(InvalidInput, match=told) as caught:
        load_preset(path)
    assert str(path) in str(caught.value)


def test_what_is_no_text_is_refused(tmp_path):
    path = tmp_path / "wrong.toml"
    path.write_bytes(b"name = '\xff'")
    with pytest.raises(InvalidInput, match=r"not a preset.*UTF-8"):
        load_preset(path)
    path.write_bytes(b"#" * (2**20 + 1))
    with pytest.raises(InvalidInput, match="at most 1048576 bytes"):
        load_preset(path)
    path.write_text("x = " + "[" * 100_000)
    with pytest.raises(InvalidInput, match=r"not a preset.*TOML"):
        load_preset(path)


def test_a_name_that_is_near_is_suggested(tmp_path):
    with pytest.raises(NotFound, match=r"defualt: no such preset; expected one of ") as caught:
        load_preset("defualt")
    assert "Did you mean 'default'?" in str(caught.value)
    with pytest.raises(NotFound, match="no such preset"):
        load_preset(tmp_path)  # a folder
