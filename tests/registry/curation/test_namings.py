"""Who set the latest release, the tags and the labels of a run, and how much is read to know it."""

from __future__ import annotations

import re

import numpy as np

from holdfast import Run
from holdfast.backends.wrappers import Call, Metered
from holdfast.registry.curation import Namings, names_of, read_namings
from holdfast.registry.face.factory import open_on
from holdfast.registry.history import RunLog
from holdfast.registry.values import as_author
from tests.support.stores import new_backend, opened


def _said(found: Namings) -> dict[tuple[str, str], str | None]:
    return {
        (one.kind, one.name): one.author and one.author.partition("@")[0] for one in found.found
    }


def _by(name: str, run: Run, act: str, *arguments: object) -> None:
    """Let somebody label, tag, publish or roll back."""
    acts = {
        "label": run.history.set_labels,
        "tag": run.pins.tags.set,
        "untag": run.pins.tags.remove,
        "publish": run.releases.publish,
        "back": run.releases.rollback,
    }
    with as_author(name):
        acts[act](*arguments)


def test_each_name_is_of_the_last_who_set_it_and_a_label_of_the_first_who_kept_it() -> None:
    backend = new_backend()
    with opened(backend) as reg:
        with as_author("ana"):
            run = reg.create_run("r", labels=["prod", "old"])
            first, last = (run.save({"w": np.ones(step)}, step=step) for step in (1, 2))
        said = lambda: _said(read_namings(run.handle.log))  # noqa: E731
        assert said() == {("label", "old"): "ana", ("label", "prod"): "ana"}
        _by("ben", run, "publish", "1.0.0", first)
        _by("cy", run, "publish", "1.1.0", last)
        assert said()["release", "1.1.0"] == "cy"
        _by("dan", run, "back", "1.0.0")
        _by("ben", run, "tag", "paper", first)
        _by("eve", run, "tag", "paper", last)
        _by("eve", run, "tag", "gone", last)
        _by("eve", run, "untag", "gone")
        _by("fay", run, "label", ["new", "prod"])
        _by("gus", run, "label", ["new", "prod", "x"])
        found = read_namings(run.handle.log)
        assert _said(found) == {
            ("release", "1.0.0"): "dan",
            ("tag", "paper"): "eve",
            ("label", "new"): "fay",
            ("label", "prod"): "ana",
            ("label", "x"): "gus",
        }
        first_by = {one.author: one.time_ms for one in [*run.history.commits()][::-1]}
        assert all(one.time_ms == first_by[one.author or ""] for one in found.found[:3])
        assert [one.ref for one in found.found[:3]] == ["r/releases/1.0.0", "r/tags/paper", "r"]
        # Without the commits before, who set a label first is not known; the others are.
        newest = [*run.history.commits()][:-6:-1]
        assert _said(names_of(run.manifest, newest))["label", "new"] is None
        assert _said(names_of(run.manifest, newest))["tag", "paper"] == "eve"
        run.retention.drop("over")
        assert said() == {}


def test_no_more_slots_are_read_than_the_names_need() -> None:
    backend = new_backend()
    with opened(backend) as reg:
        run = reg.create_run("r", labels=["prod"])
        for step in range(60):
            run.save({"w": np.zeros(2)}, step=step)
        run.pins.tags.set("paper", run.checkpoints()[3])
    calls: list[Call] = []
    with open_on(Metered(backend, calls)) as reg:
        log: RunLog = reg.run("r").handle.log
        calls.clear()
        first = read_namings(log)
        slots = [int(call.key[-20:]) for call in calls if re.search(r"/log/\d+$", call.key)]
        assert sorted(slots) == [0, *range(46, 62)]
        calls.clear()
        assert read_namings(log, first) == first
        assert calls == []
        with opened(backend) as other:
            other.run("r").pins.tags.set("late", other.run("r").checkpoints()[4])
        log.refresh()
        calls.clear()
        found = read_namings(log, first)
        assert len(calls) <= 16
        assert {**_said(first), ("tag", "late"): _said(found)["tag", "late"]} == _said(found)
        assert _said(found)["label", "prod"]
