"""What a notebook shows of an object: text only, small, without requests, even if it is damaged."""

from __future__ import annotations

from collections.abc import Callable
from html.parser import HTMLParser

import numpy as np

from holdfast import Monitor, Registry, Retention
from holdfast.backends import Backend
from holdfast.backends.wrappers import Metered
from holdfast.registry.face.factory import open_on
from holdfast.registry.values import markup
from tests.support.faults import flip
from tests.support.states import save_small, small_state
from tests.support.stores import Scratch

EVIL = "<script>alert('x')</script>\x1b[2J\u202e&lt;"
SHOWN = "<script>alert('x')</script>\\x1b[2J\\u202e&lt;"
TAGS = {"div", "p", "b", "code", "table", "thead", "tbody", "tr", "th", "td"}


class Page(HTMLParser):
    """The texts of a page that has nothing but text in tables."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.feed(html)
        self.close()
        self.all = "\n".join(self.texts)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in TAGS
        assert set(attrs) <= {
            ("class", "holdfast"),
            *(("style", style) for style in ("text-align:left", "color:#d33")),
        }

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def page(thing: object) -> Page:
    html = thing._repr_html_()  # type: ignore[attr-defined]  # as IPython calls it
    assert len(html) < 20_000
    return Page(html)


def test_each_object_shows_its_facts(reg: Registry) -> None:
    run = reg.create_run("run", monitor=Monitor(metric="loss", mode="min"))
    first = run.save(small_state(1), step=1, metrics={"loss": 0.25})
    second = run.save(small_state(2), step=2, metrics={"loss": 0.5})
    run.pins.gates.set("good", first)
    assert {"run", reg.url, reg.id} <= set(page(reg).texts)
    shown = page(run).texts
    assert {"running", "good", "best loss", "main/step00000001", "0.25", "0.5"} <= set(shown)
    assert {"run/main/step00000002", str(second.digest), "model", "optimizer"} <= set(
        page(second).texts
    )
    diff = reg.diff(first, "run/latest", values=True)
    assert {"changed", "model/w", "optimizer", "different states"} <= set(page(diff).texts)
    plan = run.retention.prune(Retention(last=1), dry_run=True)
    assert {"kept step", "latest; last 1"} <= set(page(plan).texts)
    run.save(small_state(3), step=3)
    gone = run.retention.prune(Retention(last=1))
    assert "evicted step" in page(gone).texts
    assert {"dry run", "recent", "condemned"} <= set(page(reg.gc(dry_run=True)).texts)
    assert {"ok", "checkpoints", "read"} <= set(page(reg.verify()).texts)
    assert repr(reg.verify()).startswith("<VerifyReport ok: 0 findings, 1 runs, ")
    assert "evicted" in page(second).texts


def test_releases_and_pool_show_their_entries(reg: Registry) -> None:
    run = reg.create_run("run")
    saved = run.save(small_state(1), step=1, metrics={"loss": 0.25})
    run.releases.publish("1.0.0", saved, card={"description": "d", "intended_use": "u"})
    assert {"1.0.0", saved.digest.short, "loss = 0.25"} <= set(page(run.releases).texts)
    assert repr(run.releases) == "<Releases run: 1, latest 1.0.0>"
    run.pool.promote(saved, mu=31.5, sigma=8.5)
    assert {"v0001", "31.5", "8.5"} <= set(page(run.pool).texts)
    assert repr(run.pool) == "<OpponentPool run: 1 of 1 play>"


def test_hostile_names_are_text(reg: Registry) -> None:
    run = reg.create_run("run", monitor=Monitor(metric="m", mode="min", name=EVIL))
    metrics = {EVIL: 1.0, "m": 2.0}
    checkpoint = run.save({EVIL: {EVIL: np.ones(40)}, "b": EVIL}, step=1, metrics=metrics)
    other = run.save({EVIL: {EVIL: np.zeros(40)}, "b": "c"}, step=2)
    for thing in (
        run,
        checkpoint,
        reg.diff(checkpoint, other),
        run.retention.prune(Retention(best=1)),
    ):
        assert SHOWN in page(thing).all, thing


def test_what_is_shown_is_small(reg: Registry) -> None:
    run = reg.create_run("run")
    long = "x" * 500
    for step in range(30):
        metrics = {f"{long}{step}{n}": 1.0 for n in range(20)}
        state = {f"{long}{n}": np.full(20, step) for n in range(40)}
        checkpoint = run.save(state, step=step, metrics=metrics)
    for thing in (run, checkpoint, reg.diff(run.history.checkpoint(1), checkpoint)):
        shown = page(thing)
        assert "more" in shown.all
        assert max(map(len, shown.texts)) < 200
    for n in range(30):
        reg.create_run(f"r{n}")
    assert "... and 21 more runs: reg.runs_table() has all" in page(reg).texts


def test_what_is_not_finite_is_red_and_the_run_says_so(reg: Registry) -> None:
    run = reg.create_run("run", monitor=Monitor(metric="loss", mode="min"))
    for step, loss in enumerate([1.0, float("nan")]):
        saved = run.save({"w": np.full(20, step)}, step=step, metrics={"loss": loss, "acc": 0.5})
    assert '<b style="color:#d33">nan</b>' in run._repr_html_()
    assert 'acc = 0.5, loss = <b style="color:#d33">nan</b>' in saved._repr_html_()
    assert "loss is nan" in page(run).all


def test_requests_are_those_that_the_documents_state(reg: Registry, backend: Backend) -> None:
    metered = Metered(backend)
    run = reg.create_run("run")
    saved = save_small(run, *range(3))
    run.pins.gates.set("g", saved[2])

    def requests(call: Callable[[], object]) -> int:
        with metered.measure() as used:
            call()
        return used.requests

    with open_on(metered) as other:
        seen = other.run("run")
        gone = seen.checkpoints()[0]
        run.retention.prune(Retention(last=1))
        kept, gate = seen.latest(), other.stored("run/gates/g")
        assert requests(other._repr_html_) == 1
        assert requests(seen._repr_html_) == 0
        assert kept is not None
        assert requests(kept._repr_html_) == 1
        assert requests(kept._repr_html_) == requests(gate._repr_html_) == 0
        assert requests(gone._repr_html_) == 0
        assert "evicted" in page(gone).texts


def test_damage_is_shown_in_its_place(reg: Registry, backend: Backend) -> None:
    run = reg.create_run("run")
    run.save(small_state(1), step=1, metrics={"loss": 1})
    (manifest,) = (info.key for info in backend.list("manifests/"))
    flip(backend, manifest)
    with open_on(backend) as other:
        shown = page(other.checkpoint("run")).all
    assert "Damaged: " in shown
    assert manifest in shown
    assert "loss = 1" in shown


def test_a_store_that_does_not_answer_is_shown(reg: Registry, monkeypatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(EVIL)

    monkeypatch.setattr(Scratch, "list", fail)
    shown = page(reg)
    assert f"OSError: {SHOWN}" in shown.texts
    assert reg.id in shown.texts


def test_no_error_leaves_a_description() -> None:
    def fail() -> str:
        raise RecursionError(EVIL)

    shown = Page(markup.safely(EVIL, fail)).texts
    assert shown == [SHOWN, " cannot be shown", f"RecursionError: {SHOWN}"]
