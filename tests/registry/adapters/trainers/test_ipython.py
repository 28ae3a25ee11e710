"""Completion of refs, names and tensor paths in a session of IPython."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from holdfast import Monitor, Registry
from holdfast.registry.face.factory import open_on
from holdfast.registry.face.refs import refs_of
from tests.support.faults import flip
from tests.support.states import small_state
from tests.support.stores import slots

completer = pytest.importorskip("IPython.core.completer")
interactiveshell = pytest.importorskip("IPython.core.interactiveshell")


@pytest.fixture
def reg(reg: Registry) -> Registry:
    run = reg.create_run("digits", monitor=Monitor(metric="loss", mode="min"))
    for step, loss in ((1, 0.5), (2, 0.25), (3, 0.75)):
        saved = run.save(small_state(step), step=step, metrics={"loss": loss})
    run.pins.gates.set("trained")
    run.pins.tags.set("shipped", saved)
    run.pins.artifacts.set("table", {"w": np.ones(3)})
    run.streams["losses"].append({"step": 1})
    run.releases.publish("1.0.0", saved, only=["model"], card={"description": "d"})
    reg.create_run("dreams")
    return reg


@pytest.fixture
def shell(reg: Registry, tmp_path, monkeypatch) -> Iterator[object]:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    made = interactiveshell.InteractiveShell()
    made.history_manager.enabled = False
    run = reg.run("digits")
    made.user_ns.update(reg=reg, run=run, ck=run.latest(), lazy=run.latest().lazily(), other={})
    made.run_line_magic("load_ext", "holdfast.ipython")
    yield made
    made.run_line_magic("unload_ext", "holdfast.ipython")
    assert made.Completer.custom_matchers == []
    made.history_manager.end_session()


def completed(shell, text: str) -> list[str]:
    """Return the texts with which a notebook goes on after a tab."""
    with completer.provisionalcompleter():
        found = list(shell.Completer.completions(text, len(text)))
    return [text[: one.start] + one.text + text[one.end :] for one in found]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('reg.run("d', ["digits", "dreams"]),
        ("x = reg.checkpoint('di", ["digits"]),
        ('reg.diff_runs("digits", "dr', ["dreams"]),
        ('reg.checkpoint("digits/t', ["digits/tags/shipped"]),
        ('reg.stored("digits/re', ["digits/releases/1.0.0", "digits/releases/latest"]),
        ('reg.diff("digits/latest", "digits/g', ["digits/gates/trained"]),
        ('run.pins.gates.get("', ["trained"]),
        ('run.pins.artifacts.get("', ["table"]),
        ('run.releases.get("', ["1.0.0"]),
        ('run.streams["l', ["losses"]),
        ('run.history.plot(["lo', ["loss"]),
        ('run.latest("m', ["main"]),
        ('run.history.plot("loss", phase="', ["main"]),
        ('run.pins.tags.set("', ["shipped"]),
        ('ck.load(only=["model/', ["model/w", "model/b"]),
        ('ck.lazily("o', ["optimizer"]),
        ('ck["model/', ["model/w", "model/b"]),
        ('lazy["opt', ["optimizer"]),
    ],
)
def test_strings_are_completed(shell, text: str, expected: list[str]) -> None:
    begun = text.rindex(text[max(text.rfind('"'), text.rfind("'"))]) + 1
    found = {one.rstrip("\"]'") for one in completed(shell, text)}
    assert found == {text[:begun] + one for one in expected}


@pytest.mark.parametrize("text", ['other.run("', 'reg.gc("', 'gone.run("', 'ck.load("'])
def test_other_strings_are_left_alone(shell, text: str) -> None:
    assert not [one for one in completed(shell, text) if "digits" in one or "model" in one]


def test_every_ref_that_is_offered_is_found(reg: Registry) -> None:
    offered = refs_of(reg.run("digits").manifest)
    assert {"latest", "best", "best/loss", "main/best", "main/step00000002"} <= set(offered)
    assert {reg.stored(f"digits/{ref}").run_id for ref in offered} == {"digits"}
    assert refs_of(reg.run("dreams").manifest) == []
    monitors = [Monitor(metric=name, mode="min") for name in ("absent", "loss")]
    reg.create_run("rated", monitor=monitors).save(small_state(), step=1, metrics={"loss": 1})
    offered = refs_of(reg.run("rated").manifest)
    assert "best/loss" in offered
    assert {reg.stored(f"rated/{ref}").run_id for ref in offered} == {"rated"}
    reg.run("digits").retention.drop("done")
    assert refs_of(reg.run("digits").manifest) == []


def test_damage_completes_nothing(shell, reg: Registry) -> None:
    backend = reg.handle.store.backend
    for key in slots(backend, "dreams"):
        flip(backend, key)
    for info in list(backend.list("manifests/")):
        flip(backend, info.key)
    with open_on(backend) as other:
        shell.user_ns.update(reg=other, ck=other.checkpoint("digits"))
        assert completed(shell, 'reg.checkpoint("dreams/') == []
        assert completed(shell, 'reg.checkpoint("nothing/') == []
        for text in ('ck["mod', 'ck.lazily("mod'):
            assert [one for one in completed(shell, text) if "model" in one] == []
