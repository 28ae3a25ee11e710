"""Presets: those that are shipped, those that users write, and what is told of wrong ones."""

from __future__ import annotations

import pytest

from holdfast import Monitor
from holdfast.registry.errors import Conflict, InvalidInput, NotFound
from holdfast.registry.spec import Retention
from holdfast.registry.spec.presets import load_preset, preset_names

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
    "an exit status that is none": ("signals = { exit_code = 300 }", "signals, exit_code.*255"),
    "a reaction that is none": ("signals = { sigusr1 = 'soon' }", "signals, sigusr1.*'at_cadence'"),
    "a signal that is none": ("signals = { sigterm = 1 }", "signals: no field 'sigterm'"),
    "no TOML": ("name = ", "not a preset; expected TOML; found Invalid value"),
    "a key twice": ("name = 'a'\nname = 'b'", "not a preset.*expected TOML"),
    "an unknown key": (
        "nmae = 'a'",
        r"found no field 'nmae' \(did you mean 'name'\?\)",
    ),
    "a wrong type": ("name = 5", "breaks the rules of presets.*name: must be a text, not 5"),
    "an unknown format": (
        'format = "holdfast.preset/9"',
        "format: must be 'holdfast.*, not 'holdfast",
    ),
    "a date": (
        "about = 2026-01-01",
        "rules of presets.*a date or a time: write it as a text",
    ),
    "an infinite number": (
        "[[phases]]\nname='1'\nsave_every = inf",
        "phase 1, save_every: must be a whole number, not inf",
    ),
    "an empty policy": ("retention = {}", "found retention: empty: it would keep nothing"),
    "a contradictory policy": (
        "retention = { all = true, last = 1 }",
        "found retention: contradictory: `all` keeps everything",
    ),
    "a wrong number of a policy": (
        "retention = { last = 0 }",
        "found retention, last: must be greater than or equal to 1, not 0",
    ),
    "a monitor without a mode": (
        'monitors = [{ metric = "loss" }]',
        "found monitor loss: 'mode' is missing",
    ),
    "best without a monitor": ("retention = { best = 1 }", "retention keeps the best"),
    "a phase twice": (
        "[[phases]]\nname = '1'\n[[phases]]\nname = '1'",
        "found phase 1 is declared twice",
    ),
    "a gate of no phase": (
        "gates = [{ name = 'g', phase = '2' }]\n[[phases]]\nname = '1'",
        "found gate of phase 2: not declared; declared are 1",
    ),
    "a field of a policy": (
        "[[phases]]\nname = 'pretrain'\nretention = { lst = 3 }",
        r"found phase pretrain, retention: no field 'lst' \(did you mean 'last'\?\)\. docs/presets",
    ),
    "a field that is near none": (
        "[[gates]]\nname = 'g'\nphase = '1'\nxyzzy = 1",
        r"found gate g: no field 'xyzzy' \(known are name, phase\)",
    ),
    "an entry without a name": ("phases = [{ about = 'x' }]", "found phase 1: 'name' is missing"),
    "a wrong name": ("phases = [{ name = 'a b' }]", "phase a b, name: must be letters, digits"),
    "a wrong entry": ("required_keys = ['a', 3]", "required_keys, entry 2: must be a text, not 3"),
    "an unknown dtype": (
        "dtypes = [{ path = 'm/*', dtype = 'f16' }]",
        r"found dtype rule m/\*: unknown dtype 'f16'; known are bool, .*float16, bfloat16",
    ),
    "a wrong transition": (
        "transitions = [{ from_phase = 'a', to_phase = 'b', source = 'gate/x', "
        "rows = [{ part = 'm', change = 'freeze', to = 'x', dtype = 'f16' }] }]",
        "found transition a to b, source: must be gates/NAME, latest or best, not 'gate/x'; "
        "transition a to b, row m: unknown dtype 'f16'; known are [^;]*complex128. docs",
    ),
    "what a phase says of itself": (
        "phases = [{ name = 'a', retention = { best = 1 } }]",
        "found phase a keeps its best, but has no monitor",
    ),
    "a wrong phase": (
        "[[phases]]\nname = '1'\nsave_every = 0",
        "found phase 1, save_every: must be greater",
    ),
}


@pytest.mark.parametrize(("text", "told"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_file_is_refused_and_told_where(tmp_path, text, told):
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(InvalidInput, match=told) as caught:
        load_preset(path)
    assert str(path) in str(caught.value)
    assert caught.value.hint is None or "docs/presets.md" in caught.value.hint


@pytest.mark.parametrize("preset", [{"name": "x"}, 5, b"default"])
def test_what_is_neither_name_nor_path_is_refused(reg, preset):
    for call in (load_preset, lambda preset: reg.create_run(preset=preset)):
        with pytest.raises(InvalidInput, match="not a preset; expected the name of a preset"):
            call(preset)


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
    with pytest.raises(
        NotFound, match=r"defualt: no such preset; expected default, pretrain, "
    ) as caught:
        load_preset("defualt")
    assert "Did you mean 'default'?" in str(caught.value)
    with pytest.raises(NotFound, match="no such preset"):
        load_preset(tmp_path)  # a folder


def test_fields_of_a_preset_are_replaced_by_path(reg):
    path = "phases.main.tiers.training.retention.last"
    run = reg.create_run("a", preset="adr004", overrides={path: 5, "phases.main.save_every": 2})
    (phase,) = run.manifest.spec.phases
    assert [one.retention for one in phase.tiers] == [Retention(all=True), Retention(last=5)]
    assert phase.save_every == 2
    (unchanged,) = load_preset("adr004").phases
    assert phase.tiers[0] == unchanged.tiers[0]
    # Opened again by the same rules, and by no others.
    same = {path: 5, "phases.main.save_every": 2}
    assert reg.run("a", preset="adr004", overrides=same).id == "a"
    with pytest.raises(Conflict, match="another preset"):
        reg.run("a", preset="adr004", overrides={path: 6})
    # A fork changes the rules of its parent; a value may be one of ours.
    run.save({"version": "1.0.0", "model_state_dict": {}, "config": {}}, step=1, metrics={})
    milestones = "phases.main.tiers.milestone.retention"
    fork = reg.fork("a/latest", "b", overrides={milestones: Retention(last=7)})
    tiers = fork.manifest.spec.phases[0].tiers
    assert [one.retention for one in tiers] == [Retention(last=7), Retention(last=5)]


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("phases.mian.save_every", 5, r"no such phase.*expected phases\.main\.FIELD.*'main'"),
        ("phases.main", 5, r"no such phase, or no field of one"),
        ("phases.main.save_evry", 5, r"phase main: no field 'save_evry' \(did you mean"),
        ("phases.main.save_every", 0, "phase main, save_every: must be"),
        ("phases.main.save_every.x", 1, "'save_every' has no fields"),
        ("phases..x", 1, "not a path of a preset"),
    ],
)
def test_what_cannot_be_replaced_is_told_with_the_path(path, value, told):
    with pytest.raises(InvalidInput, match=rf"adr004.*{told}"):
        load_preset("adr004", {path: value})


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("phases.main.retention.last", r"no phases.*Without phases write `retention\.last`"),
        ("gates.done.phase", "declares no gates"),
        ("save_every", "'save_every', which is a field of a phase; the preset declares no phases"),
    ],
)
def test_what_a_preset_does_not_declare_is_told(path, told):
    with pytest.raises(InvalidInput, match=rf"default.*{told}"):
        load_preset("default", {path: 100})


def test_overrides_need_a_preset(reg):
    with pytest.raises(InvalidInput, match="overrides without the preset"):
        reg.create_run(overrides={"retention.last": 3})
