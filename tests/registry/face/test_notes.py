"""Notes and labels: what people say about a run and its checkpoints."""

from __future__ import annotations

import pytest

from holdfast import Registry, Run, sync
from holdfast.registry.errors import Conflict, InvalidInput
from holdfast.registry.history.log import RunLog
from holdfast.registry.values import author
from tests.support.loads import actions_of
from tests.support.states import save_small
from tests.support.stores import new_backend, opened


def texts(run: Run) -> list[tuple[int | None, str]]:
    return [(one.checkpoint, one.text) for one in run.history.notes()]


def test_notes_are_replaced_removed_and_kept_in_the_log(reg: Registry) -> None:
    run = reg.create_run("run")
    save_small(run, 1, 2)
    first, second = run.checkpoints()
    run.history.set_note("the run")
    run.history.set_note("bad", first)
    run.history.set_note("\u202ethe best\nof all\0", second)
    run.history.set_note("worse", first)
    run.history.set_note("worse", first)  # the same again commits nothing
    assert texts(run) == [
        (None, "the run"),
        (second.handle.n, "\u202ethe best\nof all\0"),
        (first.handle.n, "worse"),
    ]
    assert {one.author for one in run.history.notes()} == {author()}
    run.history.set_note("", second)
    run.history.set_note("", second)
    assert [kind for kind, *_ in actions_of(run)[3:]] == ["note.set"] * 5
    run.retention.evict(first, reason="r")
    run.history.set_labels(["b", "a"])
    save_small(run, *range(3, 40))  # past a snapshot
    kept = [(None, "the run"), (first.handle.n, "worse")]
    again = RunLog(reg.handle.store, "run")
    assert again.open().notes == tuple(run.history.notes())
    assert texts(run) == kept
    with opened(new_backend()) as mirror:
        sync(reg, mirror)
        assert texts(mirror.run("run")) == kept
        assert mirror.run("run").manifest.labels_now == ("a", "b")
    fork = reg.fork("run/latest", "fork")
    assert (texts(fork), fork.manifest.labels_now) == ([], ())


def test_a_note_that_is_none_is_refused_and_nothing_is_written(reg: Registry) -> None:
    run, other = reg.create_run("run"), reg.create_run("other")
    save_small(run, 1, 2)
    save_small(other, 1)
    first = run.checkpoints()[0]
    run.retention.evict(first, reason="r")
    before = run.manifest.commits
    run.history.set_note("é" * 5000)
    for wrong in ("é" * 5000 + "x", "\ud800", 7):
        with pytest.raises(InvalidInput, match="10,000 bytes"):
            run.history.set_note(wrong)  # type: ignore[arg-type]
    with pytest.raises(Conflict, match="evicted"):
        run.history.set_note("x", first)
    with pytest.raises(InvalidInput, match="its own run"):
        run.history.set_note("x", other.checkpoints()[0])
    for labels in (["a b"], ["x"] * 2 + [f"l{n}" for n in range(32)], "text"):
        with pytest.raises(InvalidInput):
            run.history.set_labels(labels)
    assert run.refresh().manifest.commits == before + 1


def test_labels_are_replaced_and_found(reg: Registry) -> None:
    run = reg.create_run("run", labels=["first"])
    assert run.manifest.labels_now == ("first",)
    run.history.set_labels(["prod", "a", "prod"])
    run.history.set_labels(["a", "prod"])
    assert run.manifest.labels_now == ("a", "prod")
    assert reg.runs_table(where="labels=prod").num_rows == 1
    run.history.set_labels([])
    assert run.manifest.labels_now == ()
    assert actions_of(run) == [["run.create"], ["run.label"], ["run.label"]]
    assert reg.runs_table().column("labels").to_pylist() == [None]
