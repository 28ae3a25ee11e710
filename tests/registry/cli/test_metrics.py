"""`--metrics` and `export_metrics`: the figures of a process for Prometheus, and the alarms."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from urllib.error import URLError

import numpy as np
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

import holdfast
from holdfast.registry.errors import InvalidInput, NotFound
from holdfast.registry.saving.journal.background import BackgroundCarrier
from holdfast.registry.values.figures import HERE, METRICS
from tests.registry.cli.calling import Call, walk

ALARMS = Path(__file__).parents[3] / "examples" / "night" / "alarms.yaml"
EXPORTING = {"watch", "follow", "ui", "hub", "push", "sync", "care", "journal push"}


@pytest.fixture(autouse=True)
def own_figures(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin at 0: other tests have saved in this process, and so has the registry of each test."""
    monkeypatch.setattr(HERE, "_values", {})


def figures(text: str) -> dict[tuple[str, ...], float]:
    """Return the figures of an exposition, each by its name and the values of its labels."""
    return {
        (sample.name.removeprefix("holdfast_"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("holdfast_")
    }


def at_port(url: str | None) -> str:
    assert url is not None
    with urllib.request.urlopen(url, timeout=60) as answer:
        return str(answer.read().decode())


def test_the_commands_that_take_long_have_the_option() -> None:
    found = {
        " ".join(words): {option for given in one.params for option in given.opts}
        for words, one in walk()
    }
    for option in ("--metrics", "--metrics-runs"):
        assert {name for name, options in found.items() if option in options} == EXPORTING


def test_a_night_writes_a_file_and_the_next_goes_on_with_its_counts(
    call: Call, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror, file = tmp_path / "mirror-of-acme", tmp_path / "night.prom"
    holdfast.init(mirror, skip_race_probe=True).close()
    call("care", "--mirror", mirror, "--mirror", tmp_path / "nowhere", "--metrics", file, status=4)
    first = figures(file.read_text())
    steps = {key[1] for key in first if key[0] == "care_timestamp_seconds"}
    assert steps == {"prune", "gc", "repack", "verify", "mirror"}
    assert first["failures_total", "NotFound", "care"] == 1
    assert first["mirror_synced_timestamp_seconds", "1"] > 1e9
    assert ("mirror_synced_timestamp_seconds", "2") not in first
    assert first["damaged_findings",] == 0
    assert first["verified_timestamp_seconds",] > 1e9
    labels = {label for key in first for label in key[1:]}
    assert labels == {*steps, "NotFound", "care", "1"}
    # Another process: its counts begin where the file ends, what it does not do keeps its time.
    monkeypatch.setattr(HERE, "_values", {})
    call("care", "--mirror", tmp_path / "nowhere", "--metrics", file, status=4)
    second = figures(file.read_text())
    assert second["failures_total", "NotFound", "care"] == 2
    mirrored = ("mirror_synced_timestamp_seconds", "1")
    assert second[mirrored] == first[mirrored]
    assert list(tmp_path.glob("night.prom.*")) == []


def test_damage_and_dead_bytes_are_told(call: Call, url: str, tmp_path: Path) -> None:
    call("prune", "demo", "--last", 1)
    file = tmp_path / "x.prom"
    call("care", "--metrics", file)
    assert ("verified_timestamp_seconds",) in figures(file.read_text())
    before = figures(file.read_text())["verified_timestamp_seconds",]
    for pack in (Path(url) / "packs").rglob("*.0"):
        pack.unlink()
    call("care", "--metrics", file, status=6)
    after = figures(file.read_text())
    assert after["damaged_findings",] > 0
    assert after["verified_timestamp_seconds",] == before


@pytest.mark.parametrize("runs", [False, True])
def test_a_training_program_shows_its_saves_on_a_port_of_this_machine(url: str, runs: bool) -> None:
    reg = holdfast.open(url)
    reg.export_metrics(":0", runs=runs)
    place = reg._exports[0].url
    assert place is not None
    assert place.startswith("http://127.0.0.1:")
    with reg:
        for name in ("a", "b"):
            run = reg.create_run(name)
            run.save({"w": np.arange(300.0)}, step=1)
            pending = run.save_async({"w": np.arange(300.0) + 1}, step=2)
            pending.wait()
        with pytest.raises(holdfast.RegistryError):
            run.save({"w": np.arange(300.0) - 1}, step=2)  # the step has another content
        text = at_port(place)
    found = figures(text)
    assert "process_cpu_seconds_total" in text
    names = [("a",), ("b",)] if runs else [()]
    for name in names:
        each = 2.0 if runs else 4.0
        assert found["saves_total", "saved", *name] == each
        assert found["saved_bytes_total", *name] == each * 2400
        assert found["save_blocked_seconds_total", *name] > 0
        assert found["saved_timestamp_seconds", *name] > 1e9
    assert found["saves_total", "failed", *names[-1]] == 1
    assert found["failures_total", "Conflict", "save"] == 1
    with pytest.raises(URLError):
        at_port(place)


def test_skipped_saves_are_counted(url: str) -> None:
    with holdfast.open(url) as reg:
        run = reg.create_run("busy")
        run.handle.saver.pipeline._background._running = SimpleNamespace(side=0)
        run.save_async({"w": np.zeros(3)}, step=1, busy="skip")
        run.handle.saver.pipeline._background._running = None
    assert HERE.read(runs=True)["saves_total"] == {("skipped", "busy"): 1}


def test_what_waits_in_the_journal_is_shown(
    call: Call, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BackgroundCarrier, "wake", lambda self: None)
    monkeypatch.setattr(BackgroundCarrier, "finish", lambda self, limit_s: None)
    journal, file = tmp_path / "journal", tmp_path / "training.prom"
    reg = holdfast.open(url, journal=journal)
    reg.export_metrics(file, runs=True)
    run = reg.create_run("night")
    for step in (1, 2, 3):
        run.save({"w": np.full(300, float(step))}, step=step)
    reg.close()
    found = figures(file.read_text())
    assert found["journal_waiting_saves", "night"] == 3
    assert found["journal_waiting_bytes", "night"] > 3 * 2400
    assert found["journal_oldest_timestamp_seconds", "night"] > 1e9
    call("journal", "push", "--journal", journal, "--metrics", file)
    after = figures(file.read_text())
    assert after["journal_waiting_saves",] == 0
    assert ("journal_oldest_timestamp_seconds",) not in after
    assert after["saves_total", "saved"] == 3  # of the training


def test_a_follower_shows_how_far_it_is_behind(call: Call, url: str, tmp_path: Path) -> None:
    file = tmp_path / "watch.prom"
    call("watch", "demo", "--exec", "false", "--once", "--attempts", 1, "--metrics", file, status=1)
    behind = figures(file.read_text())
    assert behind["follower_waiting_checkpoints",] == 2
    assert behind["follower_oldest_timestamp_seconds",] > 1e9
    assert behind["failures_total", "RegistryError", "command"] == 1
    call("watch", "demo", "--exec", "true", "--once", "--group", "b", "--metrics", file)
    done = figures(file.read_text())
    assert done["follower_waiting_checkpoints",] == 0
    assert ("follower_oldest_timestamp_seconds",) not in done


def test_an_error_that_is_not_ours_has_no_name_of_its_own() -> None:
    HERE.fail(type("acme", (Exception,), {})(), "command")
    HERE.fail(NotFound("x"), "command")
    found = HERE.read(runs=False)["failures_total"]
    assert found == {("other", "command"): 1, ("NotFound", "command"): 1}


def test_of_an_earlier_file_only_what_is_ours_is_taken_over(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "x.prom"
    file.write_text(
        "# HELP holdfast_saves_total x\n# TYPE holdfast_saves_total counter\n"
        'holdfast_saves_total{outcome="saved",run="r"} 5\n'
        'holdfast_saves_total{outcome="saved",host="h"} 7\n'
        "holdfast_freed_bytes_total NaN\nholdfast_other_total 3\nholdfast_hub_open_requests 9\n"
    )
    with holdfast.open(url) as reg:
        reg.export_metrics(file)
    assert figures(file.read_text()) == {("saves_total", "saved"): 5}
    file.write_text("# HELP holdfast_saves_total x\nholdfast_saves_total{{{\n")
    monkeypatch.setattr(HERE, "_values", {})
    with holdfast.open(url) as reg:
        reg.export_metrics(file)
    assert file.read_text() == ""


@pytest.mark.parametrize(
    "target", ["model.pt", "here", ":99999", "no.such.host.invalid:9", "absent/x.prom", "mine.prom"]
)
def test_a_place_that_is_not_for_metrics_is_refused_and_nothing_is_written(
    call: Call, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.prom").write_text("node_load1 3\n")
    before = sorted(tmp_path.rglob("*"))
    with holdfast.open(url) as reg, pytest.raises(InvalidInput):
        reg.export_metrics(target)
    call("care", "--metrics", target, status=3)
    assert sorted(tmp_path.rglob("*")) == before
    assert Path("mine.prom").read_text() == "node_load1 3\n"


def test_a_disk_that_fills_later_does_not_stop_a_training(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "metrics"
    folder.mkdir()
    with holdfast.open(url) as reg:
        reg.export_metrics(folder / "x.prom")
        (folder / "x.prom").unlink()
        folder.rmdir()
        reg.create_run("a").save({"w": np.zeros(3)}, step=1)
    assert "the metrics cannot be written" in caplog.text


def test_without_the_library_the_extra_is_named(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "prometheus_client", None)
    with holdfast.open(url) as reg, pytest.raises(InvalidInput, match=r"pip install .*\[metrics\]"):
        reg.export_metrics(":0")


def alarms() -> list[Mapping[str, object]]:
    groups = yaml.safe_load(ALARMS.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_every_alarm_names_metrics_and_labels_that_exist() -> None:
    rules = alarms()
    assert len({rule["alert"] for rule in rules}) == len(rules) > 10
    for rule in rules:
        expression = str(rule["expr"])
        assert expression.count("(") == expression.count(")")
        used = re.findall(r"\bholdfast_(\w+)(?:\{([^}]*)\})?", expression)
        assert used
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        for name, chosen in used:
            assert name in METRICS, rule["alert"]
            assert set(re.findall(r"(\w+)!?=", chosen)) <= set(METRICS[name][1]), rule["alert"]


def test_every_metric_but_the_plain_counts_has_an_alarm() -> None:
    used = {name for rule in alarms() for name in re.findall(r"holdfast_(\w+)", str(rule["expr"]))}
    plain = {"saved_bytes_total", "freed_bytes_total", "journal_waiting_saves"}
    plain |= {"follower_waiting_checkpoints", "ui_pages_total", "hub_requests_total"}
    plain |= {"engine_confirmed_info", "engine_confirmed_timestamp_seconds"}
    plain |= {"engine_fetched_bytes_total"}
    assert set(METRICS) - used == plain | {"hub_sent_bytes_total", "hub_open_requests"}
