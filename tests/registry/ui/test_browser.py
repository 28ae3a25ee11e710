"""Every view in a real browser, on every kind of registry."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

import numpy as np
import pytest

import holdfast
from holdfast.registry.ui.pages import VIEWS
from tests.registry.ui.conftest import Site, Watched, served
from tests.registry.ui.kinds import EVIL

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.xdist_group("browser")

Sites = Callable[[str], Site]
Opened = Callable[[str], Watched]

#: Every view with the addresses that the tests open: those without a run on an empty registry too.
PATHS = {
    "runs": ["/", "/?q=night&sort=-best"],
    "names": ["/names"],
    "lineage": ["/lineage"],
    "run": ["/runs/night", "/runs/night-wide"],
    "run_lineage": ["/runs/night-wide/lineage"],
    "side_by_side": ["/compare-runs?run=night&run=night-wide&log=1&smooth=0.5&x=time"],
    "pool": ["/runs/night-wide/pool"],
    "checkpoint": [
        "/checkpoints/night-wide/latest",
        "/checkpoints/night-wide/latest?stats=1&shared=1",
    ],
    "diff": ["/compare?before=night-wide/gates/trained&after=night-wide/latest&values=1"],
    "storage": ["/storage", "/storage?gc=1&bytes=1&prune=night-wide&last=1"],
    "health": ["/health", "/health?verify=1"],
}
_NEEDS_RUN = ("/runs/", "/compare-runs", "/checkpoints/")


def test_every_view_is_opened_here() -> None:
    assert PATHS.keys() == {view.name for view in VIEWS}


@pytest.mark.parametrize(
    "kind",
    [
        "ordinary",
        "empty",
        "hostile",
        *(pytest.param(one, marks=pytest.mark.soak) for one in ("many", "damaged")),
    ],
)
def test_every_view_is_sound_and_fits_its_window(site: Sites, watched: Opened, kind: str) -> None:
    found = site(kind)
    watch = watched(found.base)
    watch.page.goto(found.url)
    most = None if kind == "ordinary" else 1
    for path in (path for paths in PATHS.values() for path in paths[:most]):
        if kind == "empty" and path.startswith(_NEEDS_RUN):
            continue
        answer = watch.page.goto(found.base + path)
        assert answer is not None
        assert answer.status == 200, path
        page = watch.ready()
        for width in (1280, 390):
            page.set_viewport_size({"width": width, "height": 844})
            assert page.evaluate("document.documentElement.scrollWidth") <= width, (path, width)
        assert page.locator("h1").count() == 1, path
        assert page.locator("svg[role=img]:not([aria-label]), .plot:not([aria-label])").count() == 0
        assert page.locator("table:not(:has(caption)), table:not(:has(th))").count() == 0, path
        assert page.evaluate("() => typeof hacked") == "undefined", path
        watch.check()
    if kind in ("ordinary", "many"):  # where the newest runs are sound
        page = watch.page
        page.goto(found.base)
        watch.ready()
        assert page.locator("#runs tbody tr").count() == (50 if kind == "many" else 3)
        assert page.locator("#runs .damaged").count() == 0
        assert page.evaluate("() => runs.parentElement.scrollWidth") <= 390 - 2 * 16


def test_markup_of_a_registry_is_text(site: Sites, watched: Opened) -> None:
    found = site("hostile")
    watch = watched(found.base)
    watch.page.goto(found.url)
    watch.page.goto(f"{found.base}/runs/night")
    page = watch.ready()
    assert page.get_by_text(EVIL, exact=True).count() >= 2  # titles and labels of its charts
    assert page.locator("main img, main b, main a[href^=javascript]").count() == 0
    # What the URL says is shown, too.
    evil, out = quote(EVIL, safe=""), quote(f'">{EVIL}', safe="")
    for path, least in (
        (f"/checkpoints/night/latest?tensor=model/{evil}", 4),
        ("/checkpoints/night/releases/1.0.0", 1),
        (f"/compare?before={out}&after=night/{evil}", 1),
        ("/compare?before=night/latest&after=night-wide/latest", 1),
        (f"/storage?prune={evil}&gc=1", 1),
        (f"/health?verify={evil}", 0),
    ):
        answer = page.goto(found.base + path)
        assert answer is not None
        assert answer.status == 200, path
        watch.ready()
        assert page.get_by_text("onerror=hacked=1>").count() >= least, path
        assert page.locator("main img, main b, main a[href^=javascript]").count() == 0, path
        assert page.evaluate("() => typeof hacked") == "undefined", path
    watch.check()


def test_damage_is_said_and_the_rest_is_shown(site: Sites, watched: Opened) -> None:
    found = site("damaged")
    watch = watched(found.base)
    page = watch.page
    page.goto(found.url)
    row = page.locator("#runs tbody tr", has_text="torn")
    assert "damaged" in row.inner_text()
    page.goto(f"{found.base}/runs/night")
    assert "00000004" in page.locator(".trouble").first.inner_text()
    # The events of the sound slots are there all the same.
    assert page.locator("#checkpoints tbody tr").count() >= 5
    page.goto(f"{found.base}/checkpoints/soup/latest")
    assert "manifests/" in page.locator(".trouble").inner_text()
    assert page.locator("pre").first.inner_text().startswith("holdfast pull soup/")
    page.goto(f"{found.base}/storage?bytes=1&gc=1")
    said = " ".join(page.locator(".trouble").all_inner_texts())
    assert "runs/night/log" in said
    assert "runs/torn/log" in said
    assert page.locator("#run-bytes tbody tr").all_inner_texts()[0].startswith("night-wide")
    text = page.locator("main").inner_text()
    assert "only damaged runs need count as unneeded" in text
    below = page.locator("#gc ~ p:has-text('It would delete nothing') ~ .trouble")
    assert "runs/night/log" in " ".join(below.all_inner_texts())
    page.goto(f"{found.base}/compare-runs?run=night&run=night-wide")
    text = page.locator("main").inner_text()
    assert "Fewer than two of the chosen runs can be read." in text
    assert "equal" not in text
    page.goto(f"{found.base}/health?verify=1")
    assert "runs/torn/log" in page.locator("#health-runs").inner_text()
    assert page.locator("[aria-label=Findings] li").count() >= 3


def test_from_a_run_to_the_values_of_a_tensor_and_what_moved(site: Sites, watched: Opened) -> None:
    found = site("ordinary")
    watch = watched(found.base)
    page = watch.page
    page.goto(found.url)
    page.locator("#runs").get_by_role("link", name="night-wide", exact=True).click()
    page.locator("#checkpoints").get_by_role("link").first.click()
    watch.ready()
    page.get_by_role("link", name="Read statistics").click()
    page.locator("#tensor-list thead", has_text="norm").wait_for()
    assert page.locator("#tensor-list tbody tr").first.inner_text().split()[-1] == "0"
    page.get_by_role("searchbox").fill("layer1")
    page.get_by_role("link", name="model/layer1/w", exact=True).click()
    page.locator("#histogram").wait_for()
    watch.ready()
    assert "tensor=model/layer1/w" in unquote(page.url)
    assert page.locator("#tensor-list thead").inner_text().count("norm") == 1  # they are kept
    assert page.get_by_role("searchbox").input_value() == "layer1"
    assert page.locator("#histogram .main-svg").count() >= 1
    assert "256 B of 256 B" in page.locator("main").inner_text()
    page.get_by_role("button", name="Compare", exact=True).press("Enter")
    page.get_by_role("link", name="Read the chunks that differ").press("Enter")
    page.locator("table.grid").wait_for()
    assert page.locator("table.grid tbody td[class^=hi]").count() >= 1
    address = page.url
    page.reload()
    assert page.url == address
    assert page.locator("table.grid").count() == 1
    watch.check()


def test_rows_are_sorted_and_filtered_by_mouse_and_keyboard_and_stay_in_the_url(
    site: Sites, watched: Opened
) -> None:
    found = site("ordinary")
    watch = watched(found.base)
    page = watch.page
    page.goto(found.url)
    watch.ready()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.get_by_role("button", name="best").focus()
    page.keyboard.press("Enter")
    head = page.get_by_role("columnheader", name="best")
    assert head.get_attribute("aria-sort") == "ascending"
    assert "sort=best" in page.url
    page.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "descending"
    page.get_by_role("button", name="run", exact=True).click()
    assert "sort=name" in page.url
    names = page.locator("#runs tbody th").all_inner_texts()
    assert names == sorted(names)
    assert "newest first" not in page.locator("#runs caption").inner_text()
    assert page.locator("[data-compares-all]").is_visible()
    page.reload()
    watch.ready()
    assert page.locator("#runs tbody th").all_inner_texts() == names
    page.get_by_role("searchbox", name="Filter").fill("interrupted")
    page.keyboard.press("Enter")  # all runs are loaded: there is nothing more to search
    assert page.locator("#runs tbody tr").count() == 3
    assert page.locator("[data-compares-all]").is_hidden()  # it would compare the others too
    page.reload()
    watch.ready()
    assert page.get_by_role("searchbox", name="Filter").input_value() == "interrupted"
    rows = page.locator("#runs tbody tr:visible")
    assert rows.count() == page.locator("#runs .minor .interrupted").count() < 3
    watch.check()


def test_which_hyperparameters_won(site: Sites, watched: Opened) -> None:
    found = site("sweep")
    watch = watched(found.base)
    page = watch.page
    page.goto(found.url)
    watch.ready()

    def column(name: str) -> list[str]:
        heads = [text.split("\n")[0] for text in page.locator("#runs thead th").all_inner_texts()]
        cells = page.locator(f"#runs tbody tr > :nth-child({heads.index(name) + 1})")
        return [text.split("\n")[0].strip() for text in cells.all_inner_texts()]

    # One click: the best run first, by the mode of its monitor; the other metric is not mixed in.
    page.get_by_role("button", name="best").click()
    assert column("best")[:5] == ["0.8 at 200", "1.27712 at 200", *2 * ["1.8 at 200"], "7.5 at 400"]
    assert column("best")[5] == "28 at 200"
    assert (column("lr")[0], column("batch")[0], column("run")[5]) == ("0.01", "16", "words")
    assert "0.8 of sweep-1" in page.locator("#runs tr", has_text="longer").inner_text()
    assert page.locator("caption", has_text="sorting never compares").count() == 1
    page.get_by_role("searchbox", name="Filter").fill("sweep-1")
    assert page.locator("#runs tbody tr:visible").count() == 1  # no fork of it
    page.get_by_role("searchbox", name="Filter").fill("")
    # Columns are chosen, and stay in the URL with the sort and the condition.
    page.locator("#columns summary").click()
    page.get_by_label("accuracy highest").check()
    page.get_by_label("batch", exact=True).uncheck()
    page.get_by_role("button", name="Show these columns").click()
    watch.ready()
    page.get_by_label("Where").fill("name~sweep and min.loss < 1.5")
    page.keyboard.press("Enter")
    page.wait_for_url("**where=**")
    watch.ready()
    assert column("accuracy highest") == ["0.8", "0.68072"]
    assert "batch" not in page.locator("#runs thead").inner_text()
    assert "sort=best" in page.url
    # Every row that is shown is chosen, and the bar stays in view.
    page.get_by_label("Choose all rows that are shown").check()
    assert page.locator("#chosen-count").inner_text() == "2 chosen"
    page.get_by_role("link", name="Compare all 2 that match").wait_for()
    page.goto(f"{found.base}/?group=config.batch")
    watch.ready()
    groups = page.locator("table.groups").first.locator("tbody tr").all_inner_texts()
    assert [text.split("\t")[:4] for text in groups] == [
        ["16", "3", "3.36667", "3.61432"],
        ["32", "2", "1.53856", "0.369731"],
    ][::-1]
    page.locator("table.groups").first.get_by_role("link", name="32").click()
    watch.ready()
    assert page.locator("#runs tbody tr").count() == 2
    page.get_by_role("link", name="1.8").click()  # the best as a link
    page.get_by_role("heading", name="sweep-2/main/step00000200").wait_for()
    watch.check()


def test_a_sweep_side_by_side(site: Sites, watched: Opened) -> None:
    found = site("sweep")
    watch = watched(found.base)
    page = watch.page
    page.goto(found.url)
    watch.ready()
    page.get_by_label("Where").fill("name~sweep")
    page.keyboard.press("Enter")
    page.get_by_role("link", name="Compare all 4 that match").click()
    page.wait_for_url("**all=1**")
    watch.ready()
    loss, accuracy = page.locator("#metric-1 .plot"), page.locator("#metric-2 .plot")

    def drawn(plot: str, what: str) -> list[object]:
        return page.evaluate(f"() => document.querySelector('{plot} .plot').data.map({what})")

    accuracy.scroll_into_view_if_needed()
    page.wait_for_function("() => document.querySelector('#metric-2 .main-svg')")
    # Lines of one width; a run has one colour in all charts, until a field decides it.
    assert drawn("#metric-1", "one => one.line.width") == 4 * [1.8]
    colours = drawn("#metric-1", "one => one.line.color")
    assert len({*map(str, colours)}) == 4
    assert drawn("#fields-1", "one => one.line.color") == colours
    assert drawn("#fields-2", "one => one.marker.color") == colours
    assert page.locator("#fields-1 .trace").count() == page.locator("#fields-2 .trace").count() == 4
    assert drawn("#fields-2", "one => [one.x[0], one.y[0]]")[-1] == [0.1, 1.8]
    assert page.get_by_text("Blue is the lowest value of the field").is_visible()
    changed = "at.textContent = at.textContent.replaceAll('0.001,', '0.000316116,')"
    page.evaluate(f"() => {{ const at = document.querySelector('[data-space]'); {changed}; }}")
    page.get_by_label("Points: x").select_option("config.batch")
    page.locator("#fields-1 .annotation-text", has_text="3.16e-4").wait_for()
    assert drawn("#fields-2", "one => one.x[0]") == [32, 32, 16, 16]
    # The curve under the pointer lights up in all charts and in the table, with its exact step.
    point = (
        "() => { const at = document.querySelectorAll('#metric-1 .point')[1]"
        ".getBoundingClientRect(); return [at.x + at.width / 2, at.y + at.height / 2]; }"
    )
    loss.scroll_into_view_if_needed()
    page.mouse.move(*page.evaluate(point))
    page.locator("tr.hot").wait_for()
    name = page.locator("tr.hot").get_attribute("data-run")
    assert "200" in str(page.locator("#metric-1 .hoverlayer").text_content())
    assert page.locator(".plot.dim").count() == 4
    assert page.locator(".trace.hot").count() == 4
    page.locator("#metric-2 .hoverlayer", has_text=str(name)).wait_for()
    # A zoom is one for all charts, in the URL, and goes with a click.
    box = loss.locator(".nsewdrag").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.7 * box["width"], box["y"] + 60, steps=4)
    page.mouse.up()
    page.get_by_role("button", name="Reset zoom").wait_for()
    assert "zoom=" in page.url
    # Runs are hidden and pinned; all of it survives a reload.
    page.get_by_label("Show sweep-0").uncheck()
    page.get_by_label("Pin sweep-1").check()
    page.reload()
    watch.ready()
    accuracy.scroll_into_view_if_needed()
    page.wait_for_function("() => document.querySelector('#metric-2 .main-svg')")
    low, high = page.evaluate("() => document.querySelector('#metric-2 .plot').layout.xaxis.range")
    assert 100 < low < high < 300
    assert page.get_by_label("Points: x").input_value() == "config.batch"
    assert "sweep-0" not in drawn("#metric-1", "one => one.meta")
    assert sorted(drawn("#metric-1", "one => one.line.width")) == [1.8, 1.8, 3.5]  # type: ignore[type-var]
    page.get_by_role("button", name="Reset zoom").click()
    assert "zoom=" not in page.url
    # A chart as a table and as a picture, with the policy on, and over the whole screen.
    with page.expect_download() as saved:
        page.get_by_role("button", name="Save as a table: loss").click()
    rows = saved.value.path().read_text().splitlines()
    assert rows[0] == '"curve","step","time","value"'
    assert len(rows) == 1 + 4 * 3
    with page.expect_download() as saved:
        page.get_by_role("button", name="Save as a picture: loss").click()
    assert saved.value.path().read_bytes().startswith(b"\x89PNG")
    page.get_by_role("button", name="Fill the screen: loss").click()
    page.wait_for_function("() => document.querySelector('#metric-1 .plot').clientHeight > 500")
    page.keyboard.press("Escape")
    page.goto(f"{found.base}/compare-runs?all=1&where=name~sweep&group=config.batch")
    watch.ready()
    names = page.evaluate(
        "() => document.querySelector('#metric-1 .plot').data.map(one => one.name)"
    )
    assert [name for name in names if name] == ["16 (2)", "32 (2)"]
    watch.check()


def test_a_page_follows_a_run_that_grows(site: Sites, watched: Opened, tmp_path) -> None:
    from tests.registry.ui.kinds import state

    with holdfast.init(tmp_path / "reg", skip_race_probe=True) as reg:
        run = reg.create_run("night")
        run.save(state(1), step=1, metrics={"loss": 1.0})
        with served(tmp_path / "reg") as found:
            watch = watched(found.base)
            watch.page.clock.install()
            watch.page.goto(found.url)
            watch.page.goto(f"{found.base}/runs/night")
            watch.ready()
            run.save(state(2), step=77, metrics={"loss": 0.5})
            with watch.page.expect_response("**/changes.json?*"):
                watch.page.clock.run_for(4000)
            watch.page.locator("#checkpoints tbody th", has_text="step00000077").wait_for()
            watch.check()


def test_a_few_values_that_are_far_away_stretch_no_axis(watched: Opened, tmp_path: Path) -> None:
    with holdfast.init(tmp_path / "reg", skip_race_probe=True) as reg:
        run = reg.create_run("spike")
        for step in range(1, 31):
            loss = {9: 1e9, 20: math.nan}.get(step, 1 + 1 / step)
            run.save({"w": np.zeros(1)}, step=step, metrics={"loss": loss, "calm": 1 / step})
        short = reg.create_run("short", monitor=holdfast.Monitor(metric="loss", mode="min"))
        for step, loss in enumerate((2.3, 0.31, 0.3, 0.05)):
            short.save({"w": np.zeros(1)}, step=step, metrics={"loss": loss})
    with served(tmp_path / "reg") as found:
        watch = watched(found.base)
        page = watch.page
        page.goto(found.url)
        page.goto(f"{found.base}/runs/short")  # a few values are all shown
        watch.ready()
        assert page.locator("#metric-1 [data-outside]").is_hidden()
        page.goto(f"{found.base}/runs/spike")
        watch.ready()

        def top(number: int) -> float:
            axis = f"document.querySelector('#metric-{number} .plot')._fullLayout.yaxis"
            return float(page.evaluate(f"() => {axis}.range[1]"))

        said = page.locator("#metric-2 [data-outside]")
        assert said.inner_text().startswith("1 of 29 values is outside the y axis, up to 1e+9: ")
        assert "1 value NaN or infinite, not drawn" in page.locator("#metric-2").inner_text()
        assert 2 < top(2) < 2.1
        assert page.locator("#metric-1 [data-outside]").is_hidden()
        assert top(1) > 1
        page.get_by_label("full range").check()
        said.wait_for(state="hidden")
        assert top(2) > 1e9
        assert "full=1" in page.url
        page.reload()
        watch.ready()
        assert page.get_by_label("full range").is_checked()
        page.get_by_label("full range").uncheck()
        page.get_by_label("log y axis").check()
        drawn = "document.querySelector('#metric-2 .plot').layout.yaxis.type === 'log'"
        page.wait_for_function(f"() => {drawn}")
        assert top(2) > 9
        assert said.is_hidden()
        watch.check()


def test_streams_times_since_the_start_and_names_side_by_side(
    watched: Opened, tmp_path: Path
) -> None:
    loss = holdfast.Monitor(metric="loss", mode="min")
    with holdfast.init(tmp_path / "reg", skip_race_probe=True) as reg:
        for number, name in enumerate(("a", "b", "c")):
            config = {"seed": number, "learning_rate_peak": 1 / (3 + number), "warmup": 1 + number}
            config |= {"weight_decay": 7**-number, "optimizer": {"name": f"adamw-fused-{number}"}}
            run = reg.create_run(name, config={**config, "batch_size": 2**number}, monitor=loss)
            for step in range(1, 4):
                run.log({"rate": number + 1 / step}, step=step)
                metrics = {"loss": 123.456 / (number + step), "seed": number}
                run.save({"w": np.zeros(1)}, step=step, metrics=metrics)
    with served(tmp_path / "reg") as found:
        watch = watched(found.base)
        page = watch.page
        page.goto(found.url)
        page.goto(f"{found.base}/compare-runs?run=a&run=b&run=c&col=config.seed&col=metrics.seed")
        watch.ready()
        heads = page.locator("#side thead th").all_inner_texts()
        assert {"seed (config)", "seed at best"} <= {" ".join(one.split()) for one in heads}
        page.get_by_label("time since the run began").check()
        axis = "document.querySelector('#metric-1 .plot')"
        page.wait_for_function(f"() => {axis}.layout?.xaxis.title?.text?.includes('since')")
        title = page.evaluate(f"() => {axis}.layout.xaxis.title.text")
        assert title == "seconds since the run began"
        times = page.evaluate(f"() => {axis}.data.map((one) => one.x)")
        assert all(0 <= one[0] < one[1] < one[2] < 300 for one in times)
        form = page.get_by_role("form", name="Streams")
        form.get_by_label("log").check()
        form.get_by_role("button").click()
        page.wait_for_url("**stream=log**")
        watch.ready()
        assert "x=since" in page.url
        assert page.locator("#logged-1 figcaption").inner_text() == "log: rate"
        page.locator("#logged-1").scroll_into_view_if_needed()
        page.locator("#logged-1 .main-svg").first.wait_for()
        drawn = page.evaluate(
            "() => document.querySelector('#logged-1 .plot').data.map((o) => o.y)"
        )
        assert [one[0] for one in drawn] == [1, 2, 3]
        # On no window two texts of the axes lie over each other.
        for width in (1440, 1280, 390):
            page.set_viewport_size({"width": width, "height": 844})
            page.reload()
            watch.ready()
            page.locator("#fields-1").scroll_into_view_if_needed()
            page.locator("#fields-1 .annotation-text").first.wait_for()
            boxes = page.locator("#fields-1 .annotation-text").evaluate_all(
                "all => all.map((one) => [one.textContent, one.getBoundingClientRect().toJSON()])"
            )
            assert len(boxes) >= 7 * 3
            collisions = [
                (name, other)
                for at, (name, one) in enumerate(boxes)
                for other, two in boxes[:at]
                if one["left"] < two["right"] and two["left"] < one["right"]
                and one["top"] < two["bottom"] and two["top"] < one["bottom"]
            ]  # fmt: skip
            assert (width, collisions) == (width, [])
        page.set_viewport_size({"width": 1280, "height": 900})
        watch.check()


def test_the_file_that_a_browser_is_given_leads_to_the_page(site: Sites, browser: Browser) -> None:
    """A link from a file counts as one from another site, so it brings no cookie at first."""
    from holdfast.registry.cli.ui import _link_to

    found = site("ordinary")
    with browser.new_context() as context, _link_to(found.url) as link:
        page = context.new_page()
        page.goto(link)
        page.locator("#runs").wait_for()
        assert page.url == f"{found.base}/"
        (cookie,) = context.cookies()
        assert cookie["value"] not in found.url
