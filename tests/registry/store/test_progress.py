"""Bars of the bytes to and from a store, in a notebook and on a terminal."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from holdfast import Registry
from holdfast.backends.wrappers import Metered
from tests.registry.cli.calling import Terminal
from tests.support.states import small_state
from tests.support.stores import Open, new_backend


def test_every_byte_that_moves_in_the_block_is_told(open_registry: Open) -> None:
    metered = Metered(new_backend())
    reg = open_registry(metered)
    run = reg.create_run("run")
    saved = run.save(small_state(1), step=1)
    told: list[int] = []
    inner: list[int] = []
    with metered.measure() as used, reg.progress(report=told.append):
        saved.load()
        run.save(small_state(2), step=2)
        with reg.progress(report=inner.append):
            assert reg.verify(deep=True).ok
    assert told == sorted(told)
    assert told[-1] == used.read_bytes + used.written_bytes
    assert 0 < inner[-1] < told[-1]
    before = len(told)
    saved.load()
    assert len(told) == before


@pytest.fixture
def outputs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Be a notebook; return what its output shows, one after another."""
    shown: list[str] = []

    def display(bar: object, *, display_id: bool) -> object:
        assert display_id
        shown.append(bar._repr_html_())  # type: ignore[attr-defined]
        return SimpleNamespace(update=lambda bar: shown.append(bar._repr_html_()))

    package, displays = ModuleType("IPython"), ModuleType("IPython.display")
    package.get_ipython = lambda: SimpleNamespace(kernel=object())  # type: ignore[attr-defined]
    displays.display = display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", displays)
    return shown


def test_a_notebook_shows_a_bar(reg: Registry, outputs: list[str]) -> None:
    saved = reg.create_run("run").save(small_state(1), step=1)
    with reg.progress("loading <it>", total=10 * 2**20):
        saved.load()
    assert '<progress max="10485760" value="0">' in outputs[0]
    assert "loading &lt;it&gt;: 0 B of 10.0 MiB" in outputs[0]
    assert "KiB of 10.0 MiB" in outputs[-1]
    with pytest.raises(ValueError, match="of the block"), reg.progress("short", total=1):
        saved.load()
        raise ValueError("of the block")
    assert 'max="1"' not in outputs[-1]  # the total was too low: the bar is full
    with reg.progress("open end"):
        pass
    assert "<progress></progress> open end: 0 B<" in outputs[-1]


def test_a_bar_that_cannot_be_shown_is_no_failure(reg, outputs, monkeypatch) -> None:
    def fail(bar: object) -> None:
        raise RuntimeError

    broken = SimpleNamespace(update=fail)
    monkeypatch.setattr(sys.modules["IPython.display"], "display", lambda *_, **__: broken)
    with reg.progress("x"):
        reg.create_run("run").save(small_state(1), step=1)


def test_a_terminal_shows_a_bar_and_a_pipe_nothing(reg, monkeypatch, capsys) -> None:
    run = reg.create_run("run")
    with reg.progress("saving"):
        run.save(small_state(1), step=1)
    assert capsys.readouterr().err == ""
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    with reg.progress("saving [b]x"):
        run.save(small_state(2), step=2)
    assert "saving [b]x" in screen.getvalue()
