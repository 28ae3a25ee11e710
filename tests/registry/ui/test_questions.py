"""Questions that people ask first: each is answered within three clicks from the first page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import holdfast
from holdfast import Registry, Retention
from tests.registry.ui.conftest import Site, Watched, served, watch_pages
from tests.registry.ui.kinds import LOSS, ordinary, state

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext

pytestmark = pytest.mark.xdist_group("questions")

_SWEEP = 30


def fill(reg: Registry) -> None:
    """Add to the ordinary runs a sweep over lr, a run that failed, and one that is trained."""
    ordinary(reg)
    for number in range(_SWEEP):
        labels = ["next"] * (number == 29)
        config = {"lr": 10.0**-number}
        run = reg.create_run(f"sweep-{number:02d}", monitor=LOSS, config=config, labels=labels)
        for step in (100, 200):
            loss = (0.01 if number == 7 else 1 + number) + step / 1e4
            run.save(state(step), step=step, metrics={"loss": loss})
    with suppress(RuntimeError), reg.create_run("broken", monitor=LOSS) as run:
        run.save(state(1), step=1, metrics={"loss": 1.0})
        raise RuntimeError("the loader has no more data")
    last = Retention(last=1)
    alive = reg.create_run("alive", monitor=LOSS, total_steps=1000, retention=last)
    alive.pins.tags.set("first", alive.save(state(100), step=100, metrics={"loss": 2.0}))
    for step in (200, 300):
        alive.save(state(step), step=step, metrics={"loss": 1.0})
    alive.pins.tags.remove("first")  # so that a prune takes it


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder: Path = tmp_path_factory.mktemp("questions") / "reg"
    with holdfast.init(folder, skip_race_probe=True) as reg:
        fill(reg)
    with served(folder) as found:
        yield found


class Visitor:
    """Somebody with one page of the browser, which every question begins at its first view."""

    def __init__(self, site: Site, watch: Watched) -> None:
        self._site, self._watch = site, watch
        self.page = watch.page
        self.page.set_default_timeout(300_000)
        self.clicks = 0
        self.page.goto(site.url)

    def begin(self) -> None:
        """Go to the first view, and forget the clicks."""
        self.page.goto(self._site.base)
        self._settle()
        whole = "() => !document.body.dataset.following.includes('\"partial\": true')"
        self.page.wait_for_function(whole)
        self.clicks = 0

    def click(self, selector: str) -> None:
        self.clicks += 1
        self.page.locator(selector).first.click()
        self._settle()

    def _settle(self) -> None:
        """Wait for the script of the page, but not until charts are drawn, which takes long."""
        self.page.wait_for_selector("html[data-ready]")

    def sees(self, selector: str) -> str:
        """Return the text of an element that can be seen."""
        found = self.page.locator(selector).first
        found.wait_for(state="visible")
        return " ".join(found.inner_text().split())

    def leave(self) -> None:
        assert self.clicks <= 3
        self._watch.check()


@pytest.fixture(scope="module")
def somebody(questions: Site, context: BrowserContext) -> Iterator[Visitor]:
    with watch_pages(context) as watched:
        yield Visitor(questions, watched(questions.base))


@pytest.fixture
def visitor(somebody: Visitor) -> Iterator[Visitor]:
    somebody.begin()
    yield somebody
    somebody.leave()


def run(name: str) -> str:
    """Return the link of a run in the table."""
    return f'#runs th a:text-is("{name}")'


def test_which_run_is_best_and_at_which_step(visitor: Visitor) -> None:
    visitor.click("#runs th[data-sort=best] button")
    first = visitor.sees("#runs tbody tr")
    assert "sweep-07" in first
    assert "at 100" in first


def test_which_hyperparameters_matter_and_thirty_curves_over_each_other(visitor: Visitor) -> None:
    visitor.click("text=/^Compare all/")
    lines = "figure:has-text('Each run as a line through its values') .plot"
    visitor.page.locator(f"{lines} .main-svg").first.wait_for()
    assert "lr" in visitor.sees(lines)
    assert "lr" in visitor.page.locator("#ranking tbody th").all_inner_texts()
    chart = visitor.page.locator("#curves figure", has_text="loss").first
    chart.scroll_into_view_if_needed()
    chart.locator(".main-svg").first.wait_for()
    names = chart.locator(".plot").evaluate("one => [...new Set(one.data.map((it) => it.meta))]")
    assert len([name for name in names if name.startswith("sweep-")]) == _SWEEP
    # So many curves have no names beside them: the legend has, in their colours.
    legend = {
        one.inner_text().split()[-1]: one.locator(".swatch").evaluate("it => it.style.color")
        for one in visitor.page.locator("#legend .key").all()
    }
    assert {*names} <= legend.keys()
    assert len({*legend.values()}) > 20
    # A run has one look in all charts, and no other run has the same.
    looks_of = (
        "one => one.data.filter((it) => it.line.dash !== 'dot')"
        ".map((it) => [it.meta, `${it.line.color} ${it.line.dash}`])"
    )
    looks = dict(chart.locator(".plot").evaluate(looks_of))
    assert len({*looks.values()}) == len(looks) > _SWEEP
    assert looks.items() <= dict(visitor.page.locator(lines).evaluate(looks_of)).items()
    assert "at most 10 runs" in visitor.sees("#legend ~ p, main")


def test_is_it_alive_and_how_far(visitor: Visitor) -> None:
    visitor.click(run("alive"))
    assert visitor.sees("#summary .state") == "running"
    assert visitor.sees(".progress").startswith("300 of 1,000 steps, 30%")


def test_why_did_it_fail(visitor: Visitor) -> None:
    visitor.click(run("broken"))
    assert "RuntimeError: the loader has no more data" in visitor.sees(".trouble")


def test_how_do_i_load_it(visitor: Visitor) -> None:
    visitor.click(run("sweep-07"))
    visitor.click("#checkpoints tbody th a")
    assert "reg.checkpoint('sweep-07/main/step00000200').load()" in visitor.sees("#load")


def test_what_differs(visitor: Visitor) -> None:
    for name in ("night", "night-wide"):
        visitor.click(f'#runs input[value="{name}"]')
    visitor.click("[data-compares]")
    differing = visitor.sees('.scroll[aria-label^="Values that differ; marked"]')
    assert re.search(r"\blr 0\.[12] 0\.[12]\b", differing)


def test_what_takes_the_bytes_and_what_would_a_prune_free(visitor: Visitor) -> None:
    visitor.click('nav a:text-is("Storage")')
    visitor.click("text=Count the bytes of each run")
    largest = visitor.sees("#run-bytes tbody tr")
    assert re.search(r"^\S+ \d+ [\d.]+ KiB", largest)
    visitor.click('#run-bytes tr:has(th a:text-is("alive")) a:has-text("plan")')
    plan = visitor.sees("#prune ~ p")
    assert re.search(r"^1 checkpoint would go, \d+ stays?\..* [\d.]+ \w+ on the store", plan)


def test_where_does_it_come_from(visitor: Visitor) -> None:
    visitor.click(run("night-wide"))
    visitor.click('.tabs a:text-is("Lineage")')
    assert "fork from night main/step00000080" in visitor.sees(".graph")
    visitor.begin()
    visitor.click(run("soup"))
    assert "merged from night/main/step" in visitor.sees("#summary")
    assert visitor.sees("#summary .state") == "merged"
    visitor.click("#summary a:has-text('night/main/step')")
    assert visitor.sees("h1").startswith("night/main/step")


def test_what_is_in_production_and_who_put_it_there(visitor: Visitor, questions: Site) -> None:
    visitor.click('nav a:text-is("Names")')
    first, *others = visitor.page.locator("#names tbody tr").all_inner_texts()
    first = " ".join(first.split())
    assert re.match(r"1\.0\.0 latest release night main/step00000080 \S+@\S+ 20\S+ \S+Z$", first)
    assert [one.split()[:3] for one in others] == [
        ["shipped", "tag", "night"],
        ["next", "label", "sweep-29"],
        ["prod", "label", "night-wide"],
    ]
