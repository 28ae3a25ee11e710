"""Parts of views that only some registries have: each is rendered once, without a browser."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import ExitStack
from html import unescape
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast import Monitor, Registry
from holdfast.registry import formats
from holdfast.registry.history import format_time
from holdfast.registry.saving.journal.background import BackgroundCarrier
from holdfast.registry.store.address import Address
from holdfast.registry.ui.pages import pool as pool_query
from holdfast.registry.ui.pages.runs import list_runs
from holdfast.registry.ui.rendering import breakable
from holdfast.registry.ui.server import Entrance, application
from holdfast.registry.ui.source import Source
from holdfast.registry.values.process import author
from tests.registry.curation.pool.league import LEAGUE, player

_HEADERS = [(b"host", b"127.0.0.1:1"), (b"cookie", b"holdfast_1=secret")]


def shown(source: Source, path: str, *, status: int = 200, raw: bool = False) -> str:
    """Return the text of a page, without its markup unless it is asked for."""
    app = application(source, Entrance("http://127.0.0.1:1", session="secret"))
    place, _, query = path.partition("?")
    scope = {
        "type": "http", "method": "GET", "path": place, "raw_path": place.encode(), "root_path": "",
        "query_string": query.encode(), "headers": _HEADERS, "scheme": "http",
    }  # fmt: skip
    said: list[dict] = []

    async def receive() -> dict:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict) -> None:
        said.append(message)

    asyncio.run(app(scope, receive, send))
    text = b"".join(one.get("body", b"") for one in said).decode()
    assert said[0]["status"] == status, text
    if raw:
        return text
    body = re.sub(r"<script.*?</script>", " ", text, flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", body.replace("<wbr>", ""))).split())


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "reg"


@pytest.fixture
def reg(place: Path) -> Iterator[Registry]:
    with holdfast.init(place, skip_race_probe=True) as made:
        yield made


@pytest.fixture
def source(reg: Registry, place: Path) -> Iterator[Source]:
    with ExitStack() as stack:
        found = Source.open(Address(place))
        stack.callback(found.close)
        yield found


def test_health_with_mirrors_a_journal_and_findings(
    reg: Registry, source: Source, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = reg.create_run("r")
    run.save({"w": np.arange(1000.0)}, step=1)
    (pack,) = (place / "packs").rglob("*.0")
    pack.write_bytes(b"")
    reg.verify()
    monkeypatch.setattr(BackgroundCarrier, "wake", lambda self: None)
    monkeypatch.setenv("HOLDFAST_JOURNAL", str(tmp_path / "journal"))
    holdfast.open(place).run("journaled", create=True).save({"a": 1}, step=7)
    with holdfast.init(tmp_path / "copy", skip_race_probe=True):
        mirror = Source.open(Address(tmp_path / "copy"))
    source.mirrors = (mirror,)
    text = shown(source, "/health")
    assert "1 error when this machine verified it last" in text
    assert "the structure of 1 checkpoint in 1 run" in text
    assert "phase main, step 7 waiting" in text
    assert "Compare the newest runs" in text
    text = shown(source, "/health?mirrors=1&verify=1")
    assert "r without it 2 0" in text
    found = text.partition("Verification")[2]
    assert "1 error when it was verified just now: the structure of 2 runs, 1 checkpoint" in found
    assert "Affects r/" in found
    mirror.close()


def test_damage_is_told_wherever_it_is_known(reg: Registry, source: Source, place: Path) -> None:
    reg.create_run("r").save({"w": np.arange(1000.0)}, step=1)
    assert "Never verified : this machine has not verified this registry" in shown(
        source, "/health"
    )
    assert "Needs attention" not in shown(source, "/")
    reg.verify()
    text = shown(source, "/health")
    assert "No error when this machine verified it last" in text
    assert "Bytes not verified" in text
    (pack,) = (place / "packs").rglob("*.0")
    pack.chmod(0o644)
    pack.write_bytes(b"x" + pack.read_bytes()[1:])
    reg.verify(deep=True)
    reg.verify()  # too little to see it
    for path in ("/health", "/health?verify=1"):
        text = shown(source, path)
        assert "1 error known; none found when " in text
        assert "1 error of an earlier verification" in text
        assert "No error" not in text
        assert "Bytes not verified" not in text
    assert "Damaged: main/step00000001. Health has the error" in shown(source, "/runs/r")
    for name in ("failed-1", "failed-2"):
        reg.create_run(name).status = "failed"
    loss = Monitor(metric="loss", mode="min")
    half = reg.create_run("half", monitor=loss, total_steps=9)
    half.save({"a": 1}, step=4, metrics={"loss": float("nan")})
    half.status = "interrupted"
    found = list_runs(source).attention
    assert sorted(found.pop("failed")) == ["failed-1", "failed-2"]
    assert found == {
        "damaged": ["r"],
        "NaN or infinite": ["half"],
        "interrupted before the last step": ["half"],
    }
    first = shown(source, "/")
    assert "Needs attention: " in first
    assert " 2 failed" in first
    assert "2 runs , the newest first" in shown(source, "/?run=failed-1&run=failed-2")


def test_a_dropped_run_keeps_nothing(reg: Registry, source: Source) -> None:
    run = reg.create_run("r")
    run.save({"a": 1}, step=1)
    assert "kept 1 checkpoint" in shown(source, "/runs/r")
    run.retention.drop("old")
    text = shown(source, "/runs/r")
    assert "kept 0 checkpoints" in text
    assert "everything stays" not in text
    assert "main/step00000001 the run was dropped dropped" in text
    assert 'href="/checkpoints/r/' not in shown(source, "/runs/r", raw=True)  # nothing opens it


def test_a_checkpoint_with_everything(reg: Registry, source: Source, tmp_path: Path) -> None:
    run = reg.create_run("r", monitor=Monitor(metric="loss", mode="min"))
    run.save(
        {
            "model": {"c": np.full(64, 1 + 2j), "nan": np.full(99, np.nan), "one": np.float32(3)},
            "big": np.zeros(2**20 * 3, np.float32),
        },
        step=1,
        companions={"frozen": {"w": np.ones(3)}},
    )
    text = shown(source, "/checkpoints/r/latest?stats=1&tensor=big&shared=1&budget=4")
    assert "Read 4.0 MiB of 12.0 MiB: chunks evenly spread over the tensor, within 4 MiB" in text
    assert "1 tensor of 12.0 MiB did not fit into 4 MiB" in text
    assert "model/nan" in text
    assert "99, 0" in text
    assert "(1+2j)" in text
    assert "Companions frozen" in text
    assert "The run keeps no other checkpoint." in text
    assert "No element is finite." in shown(source, "/checkpoints/r/latest?tensor=model/nan")
    assert "companion" in shown(source, "/checkpoints/r/main/step1/companions/frozen")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "notes.txt").write_text("hello")
    run.save(formats.read(folder).state, step=2)
    text = shown(source, "/checkpoints/r/latest")
    assert "notes.txt 5 B opaque" in text
    run.retention.evict(run.checkpoints()[0], "too old")
    assert "evicted (too old)" in shown(source, "/checkpoints/r/main/step1", status=404)


def test_a_name_breaks_where_it_has_parts_and_markup_in_it_is_text() -> None:
    assert breakable("model/a_b.<b>_") == "model/<wbr>a_<wbr>b.<wbr>&lt;b&gt;_"


def test_the_first_page_says_what_is_in_production_and_who_disagrees(
    reg: Registry, source: Source
) -> None:
    for name, mode, labels in (("a", "min", ["production"]), ("b", "min", ["prod"])):
        run = reg.create_run(name, monitor=Monitor(metric="loss", mode=mode), labels=labels)
        for step in (1, 2):
            run.save({"w": np.full(4, step)}, step=step, metrics={"loss": 4 / step})
    loud = reg.create_run("c", monitor=Monitor(metric="acc", mode="max"))
    loud.pins.tags.set("keeper", loud.save({"w": np.ones(4)}, step=7, metrics={"acc": 0.5}))
    first = shown(source, "/")
    assert "in production" not in first  # nothing was released: labels contradict nothing
    assert "best loss 2 at 2 of " in first
    assert "best acc 0.5 at 7 of c" in first
    one, two = (reg.checkpoint(f"a/main/step{step}") for step in (1, 2))
    run = reg.run("a")
    released = run.releases.publish("1.0.0", one)
    when = format_time(released.record.time_ms)
    found = shown(source, "/checkpoints/a/releases/latest")
    assert f"published {when} by {author()} (claimed" in found
    run.pins.tags.set("prod", two)
    first = shown(source, "/")
    assert "in production a 1.0.0 " in first
    said = "Not the latest release, which is what is in production: "
    assert f"{said}tag prod of a " in first
    assert f"{said}label prod of b " in first
    assert first.count(said) == 2
    run.pins.tags.set("prod", one)
    reg.run("b").retention.drop("a trial")
    assert said not in shown(source, "/")


def test_a_status_says_why_on_the_page_of_a_run(reg: Registry, source: Source) -> None:
    run = reg.create_run("r", total_steps=2)
    run.save({"a": 1}, step=1)
    reg.fork("r/latest", "f")
    run.status = "interrupted"
    assert "1 of 2 steps, 50%; 1 step left" in shown(source, "/runs/r")
    assert "of 2 steps" not in shown(source, "/runs/f")  # it has begun nothing
    assert "status interrupted its program ended, or got a signal, before" in shown(
        source, "/runs/r"
    )
    assert "status forked nobody has trained this fork yet" in shown(source, "/runs/f")


def test_a_run_without_a_monitor_has_no_best(reg: Registry, source: Source) -> None:
    reg.create_run("r").save({"a": 1}, step=1, metrics={"loss": 0.5})
    text = shown(source, "/runs/r")
    assert "latest loss 0.5" in text
    assert "best" not in text


def test_two_checkpoints_that_hardly_fit_the_budget(reg: Registry, source: Source) -> None:
    run = reg.create_run("r")
    large, small = np.zeros(2**20 * 3, np.float32), np.ones(100)
    run.save({"large": large, "small": small, "old": small * 3, "note": "a"}, step=1)
    run.save({"large": large + 1, "small": small * 2, "new": small * 3, "note": None}, step=2)
    both = "before=r/main/step1&after=r/main/step2"
    text = shown(source, f"/compare?{both}&values=1&budget=4")
    assert "1 tensor of 24.0 MiB did not fit into 4 MiB" in text
    assert "new moved" in text
    assert '"a" null' in text
    assert "Both are the same state" in shown(source, "/compare?before=r/latest&after=r/latest")
    assert "no checkpoint at this step" in shown(source, "/compare?before=r/main/step9&after=r")


def test_a_pool_of_which_a_part_was_read(
    reg: Registry, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("openskill")
    run = reg.create_run("r", preset=LEAGUE)
    for step in range(1, 6):
        run.pool.promote(run.save(player(step), step=step, phase=3))
    run.pool.record_match([4, 5], [1, 2])
    monkeypatch.setattr(pool_query, "SLOTS_READ", 2)
    text = shown(source, "/runs/r/pool")
    assert "from the newest 2 of" in text
    assert "v1 " not in text.partition("Left the pool")[2].partition("Read-only")[0]
    whole = shown(source, "/runs/r/pool?slots=all")
    assert "v1 " in whole.partition("Left the pool")[2]
    assert "v4 100%" in whole


def test_what_a_prune_by_the_own_policy_would_free(reg: Registry, source: Source) -> None:
    run = reg.create_run("r", preset="adr004")
    assert "the run has no checkpoints" not in shown(source, "/storage?prune=r")
    del run
    plain = reg.create_run("plain")
    for step in (1, 2, 3):
        plain.save({"w": np.full(5000, step)}, step=step)
    text = shown(source, "/storage?prune=plain&last=1&bytes=1&gc=1&grace=0")
    assert "2 checkpoints would go, 1 stays" in text
    assert "KiB on the store would be freed by gc and repack" in text
    free = shown(source, "/storage?free=1").partition("What can be deleted")[2]
    assert "older checkpoints of runs without a policy plain 2 " in free
    assert "Bytes by run" in free  # below it
    assert "the newest, the best and whatever a pin or a hold keeps" in free
    assert "a day after that by default; until then its dry run calls them too recent" in free
    for number in range(10):
        run = reg.create_run(f"failed-{number}")
        run.save({"w": np.full(900, number)}, step=1)
        run.status = "failed"
    free = shown(source, "/storage?free=1&bytes=1")
    assert "2 more failed-8 , failed-9 10 " in free
    assert re.search(r"together, at least 12 \d+\.\d KiB", free)
    assert free.count("Own and shared bytes of each run") == 2 + 1  # of the chart, its table
    assert "holdfast prune plain --last 1" in free
    assert "for run in failed-0 failed-1 " in free
    assert 'do holdfast run rm "$run" --reason failed; done' in free
    unplanned = shown(source, "/storage?prune=plain")
    assert "keeps everything" in unplanned
    told = unplanned.partition("What a prune would evict")[2]
    assert "No plan plain: the run has no retention policy: it keeps everything" in told
    assert "Say how many of the last or best checkpoints to keep." in told
    for number in ("x", "-1", "0" * 12 + "9" * 5000):
        said = shown(source, f"/storage?prune=plain&last={number}", status=400)
        assert "not a number for this page" in said
