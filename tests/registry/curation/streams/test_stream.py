"""Streams: appended alone or with a checkpoint, read by step, taken back, put aside."""

from __future__ import annotations

import math
import threading

import pytest

from holdfast.backends import StoreUnavailable
from holdfast.backends.memory import MemoryBackend
from holdfast.backends.wrappers import Metered, Wrapper
from holdfast.registry.curation.streams import appends as stream_appends
from holdfast.registry.curation.streams.segments import pack_entries
from holdfast.registry.errors import (
    Conflict,
    Damaged,
    IntegrityError,
    InvalidInput,
    Malformed,
    NotFound,
    UnsupportedValue,
)
from holdfast.registry.face.factory import open_on
from holdfast.registry.history import slots as slots_module
from holdfast.registry.history.actions import AppendStream
from holdfast.registry.writing.change import Composed
from tests.cost.rounds import Clock, Timed, timed
from tests.support.faults import Hooked, Once, flip
from tests.support.states import entries, run_by, small_state
from tests.support.stores import contents, new_backend, slots

SAVES, EACH = 120, 500
PRESET = """
name = "night"
streams = [
    { name = "loss", lifetime = "forever" },
    { name = "samples", lifetime = "resettable" },
]
"""


@pytest.fixture
def loss(run):
    return run.streams["loss"]


@pytest.fixture
def night(reg, tmp_path):
    """A run whose preset declares streams."""
    return run_by(reg, tmp_path, PRESET, "night")


@pytest.fixture(scope="module")
def long_history() -> MemoryBackend:
    """A run of 120 saves, each with 500 entries of its stream."""
    backend = new_backend()
    with open_on(backend) as registry:
        run = registry.create_run("long", seed=1)
        for i in range(SAVES):
            more = {"loss": entries(i * EACH, (i + 1) * EACH)}
            run.save({"i": i}, step=i + 1, streams=more)
    return backend


# Appending and reading


def test_entries_come_back(loss, run, backend, open_registry):
    first = [{"step": 1, "loss": math.nan, "arm": "a"}, {"loss": 2, "step": 0, "more": [1, (2,)]}]
    assert loss.append(first) == 2
    assert loss.append({"step": 2, "loss": 0.5}) == 3
    assert loss.append([]) == 3
    found = open_registry(backend).run("run").streams["loss"].read()
    assert [list(entry) for entry in found] == [
        ["step", "loss", "arm"],
        ["loss", "step", "more"],
        ["step", "loss"],
    ]
    assert math.isnan(found[0]["loss"])
    assert found[1:] == [first[1], {"step": 2, "loss": 0.5}]
    assert type(found[1]["loss"]) is int
    assert type(found[1]["more"][1]) is tuple
    assert (loss.count, loss.lifetime, loss.archives) == (3, "forever", {})


def test_appending_needs_no_token(loss, run, backend, open_registry):
    run.save(small_state(), step=1)
    open_registry(backend).run("run").streams["loss"].append(entries(0, 2))
    run.save(small_state(1), step=2, streams={"loss": entries(2, 4)})
    assert loss.read() == entries(0, 4)
    assert run.manifest.writer is not None


def test_an_append_is_one_commit(loss, backend):
    before = len(slots(backend))
    loss.append(iter(entries(0, 100)))
    assert len(slots(backend)) == before + 1


def test_only_entries_within_the_bounds_are_read(loss):
    loss.append(entries(0, 100))
    loss.append([{"step": 50, "again": True}, *entries(90, 110)])
    assert loss.read(98, 100) == [*entries(98, 100), *entries(98, 101)]
    assert loss.read(first_step=105) == entries(105, 110)
    assert loss.read(last_step=1) == entries(0, 2)
    assert loss.read(50, 50) == [*entries(50, 51), {"step": 50, "again": True}]
    assert loss.read(200) == []
    for bounds in ((-1, None), (0, True), (5, 4), ("0", None)):
        with pytest.raises(InvalidInput):
            loss.read(*bounds)


def test_the_streams_of_a_run_are_listed(run, loss):
    assert list(run.streams) == []
    run.streams["samples"].append({"step": 1})
    loss.append({"step": 1})
    assert list(run.streams) == [one.name for one in run.streams.list()] == ["samples", "loss"]
    assert [one.count for one in run.streams.list()] == [1, 1]


def test_a_stream_that_is_not_there(run, loss):
    run.streams["losses"].append(entries(0, 1))
    assert (loss.count, loss.lifetime, loss.archives) == (0, None, {})
    with pytest.raises(NotFound, match="'losses'"):
        loss.read()
    with pytest.raises(NotFound, match="'losses'"):
        loss.archive("pivot")
    with pytest.raises(InvalidInput, match="legal name"):
        run.streams["a/b"]


@pytest.mark.parametrize(
    "bad",
    [[{"loss": 1}], [{"step": -1}], [{"step": 1}, 2], 3, "x", [{"step": 1, "x": object()}]],
)
def test_bad_entries_are_refused_before_anything_is_written(bad, loss, backend):
    before = contents(backend)
    with pytest.raises((InvalidInput, UnsupportedValue)):
        loss.append(bad)
    assert contents(backend) == before


# Lifetimes


def test_a_lifetime_is_fixed_by_the_first_append(run, loss):
    loss.append(entries(0, 1), lifetime="resettable")
    assert loss.lifetime == "resettable"
    assert loss.append(entries(1, 2)) == 2
    with pytest.raises(InvalidInput, match="another lifetime"):
        loss.append(entries(2, 3), lifetime="forever")
    with pytest.raises(InvalidInput, match="forever or resettable"):
        loss.append(entries(2, 3), lifetime="sometimes")


def test_what_the_preset_declares_wins(night):
    assert night.streams["samples"].lifetime == "resettable"
    assert night.streams["samples"].read() == []
    night.streams["samples"].append(entries(0, 1))
    night.save({"w": 1}, step=1, streams={"loss": entries(0, 1)})
    assert night.manifest.stream("samples").lifetime == "resettable"
    assert night.manifest.stream("loss").lifetime == "forever"
    with pytest.raises(InvalidInput, match="another lifetime"):
        night.streams["loss"].append(entries(0, 1), lifetime="resettable")


def test_undeclared_names_are_refused_where_names_are_declared(night, backend):
    stream, before = night.streams["sample"], contents(backend)
    for act in (
        lambda: stream.append(entries(0, 1)),
        lambda: night.save({"w": 1}, step=1, streams={"sample": entries(0, 1)}),
        lambda: stream.read(),
        lambda: stream.count,
        lambda: stream.lifetime,
        lambda: stream.archives,
        lambda: stream.archive("pivot"),
    ):
        with pytest.raises(InvalidInput, match="'samples'"):
            act()
    assert not any(key not in before for key in contents(backend, "runs/"))


# Archives


def test_a_resettable_stream_is_put_aside(run, backend, open_registry):
    samples = run.streams["samples"]
    samples.append(entries(0, 5), lifetime="resettable")
    samples.append(entries(5, 7))
    assert samples.archive("pivot-1") == 7
    assert samples.count == 0
    assert samples.read() == []
    samples.append(entries(100, 102))
    assert samples.archive("pivot-2") == 2
    samples.append(entries(200, 201))
    again = open_registry(backend).run("run").streams["samples"]
    assert again.archives == {"pivot-1": 7, "pivot-2": 2}
    assert again.read(archive="pivot-1") == entries(0, 7)
    assert again.read(101, archive="pivot-2") == entries(101, 102)
    assert again.read() == entries(200, 201)
    with pytest.raises(NotFound, match="'pivot-1'"):
        again.read(archive="pivot1")


def test_an_archive_may_be_repeated_until_something_new_is_there(run, backend):
    samples = run.streams["samples"]
    samples.append(entries(0, 5), lifetime="resettable")
    samples.archive("pivot")
    before = slots(backend)
    assert samples.archive("pivot") == 5
    assert slots(backend) == before
    samples.append(entries(5, 6))
    with pytest.raises(Conflict, match="exists already"):
        samples.archive("pivot")
    with pytest.raises(InvalidInput, match="legal name"):
        samples.archive("a b")


def test_a_stream_for_ever_is_never_archived(loss, night, backend):
    loss.append(entries(0, 5))
    with pytest.raises(InvalidInput, match="kept for ever"):
        loss.archive("pivot")
    with pytest.raises(InvalidInput, match="kept for ever"):
        night.streams["loss"].archive("pivot")
    assert loss.read() == entries(0, 5)


def test_a_dropped_run_takes_no_entries(run, loss):
    loss.append(entries(0, 5), lifetime="resettable")
    run.retention.drop("gone")
    with pytest.raises(Conflict, match="gone"):
        loss.append(entries(5, 6))
    with pytest.raises(Conflict, match="gone"):
        loss.archive("pivot")
    assert run.refresh().manifest.dropped == "gone"


# With checkpoints


def test_entries_become_visible_with_their_checkpoint(run, backend, open_registry):
    reader = open_registry(backend).run("run").streams["loss"]
    run.save(small_state(1), step=1, streams={"loss": entries(0, 10), "arms": entries(0, 2)})
    assert reader.read() == entries(0, 10)
    marks = run.latest().handle.newest_record().streams
    assert {name: mark.count for name, mark in marks.items()} == {"loss": 10, "arms": 2}
    # The same save once more says nothing new, entries included.
    run.save(small_state(1), step=1, streams={"loss": entries(0, 10)})
    assert reader.count == 10


def test_a_save_that_is_refused_appends_nothing(run, loss):
    run.save(small_state(1), step=1, streams={"loss": entries(0, 10)})
    with pytest.raises(Conflict):
        run.save(small_state(2), step=1, streams={"loss": entries(10, 20)})
    assert loss.read() == entries(0, 10)


@pytest.mark.parametrize("kept", range(1, 9))
def test_coming_back_takes_streams_back(kept, run, loss):
    """Wherever the cut falls, also inside a segment that was merged since."""
    for step in range(1, 9):
        ends = (step - 1) * 3, step * 3
        run.save(small_state(step), step=step, streams={"loss": entries(*ends)})
    assert any(segment.count > 3 for segment in run.manifest.stream("loss").segments)
    run.restore(at=run.checkpoints()[kept - 1])
    assert loss.count == 24  # until the run goes on
    run.save(small_state(90), step=kept + 1, streams={"loss": entries(900, 902)})
    assert loss.read() == [*entries(0, 3 * kept), *entries(900, 902)]
    # And on: the remains of a segment are merged like any other.
    run.save(small_state(91), step=kept + 2, streams={"loss": entries(902, 940)})
    loss.append(entries(940, 941))
    assert loss.read() == [*entries(0, 3 * kept), *entries(900, 941)]
    assert loss.read(3 * kept - 1, 900) == [*entries(3 * kept - 1, 3 * kept), *entries(900, 901)]


def test_coming_back_without_new_entries_takes_streams_back(run, loss):
    first = run.save(small_state(1), step=1, streams={"loss": entries(0, 3)})
    run.save(small_state(2), step=2, streams={"loss": entries(3, 6), "late": entries(0, 1)})
    run.restore(at=first)
    run.save(small_state(3), step=2)
    assert loss.read() == entries(0, 3)
    assert run.streams["late"].count == 0


def test_entries_that_others_append_after_the_checkpoint_go_with_a_rewind(
    run, loss, backend, open_registry
):
    other = open_registry(backend).run("run").streams["loss"]
    first = run.save(small_state(1), step=1, streams={"loss": entries(0, 4)})
    other.append(entries(4, 6))
    run.save(small_state(2), step=2, streams={"loss": entries(6, 8)})
    other.append(entries(8, 9))
    assert loss.read() == entries(0, 9)
    run.restore(at=first)
    other.append(entries(9, 10))  # the run has not gone on yet
    run.save(small_state(3), step=2, streams={"loss": entries(700, 701)})
    assert other.read() == [*entries(0, 4), *entries(700, 701)]
    other.append(entries(701, 703))
    assert loss.read() == [*entries(0, 4), *entries(700, 703)]


# Beside other writers


def test_a_merged_segment_is_written_anew_when_another_came_first(
    run, loss, backend, open_registry
):
    loss.append(entries(0, 2))
    hooked = Hooked(backend)
    other = open_registry(hooked).run("run").streams["loss"]
    hooked.before = Once("runs/", lambda: loss.append(entries(2, 3)), "put_if_absent")
    assert other.append(entries(3, 5)) == 5
    assert hooked.before.done
    assert loss.read() == entries(0, 5)


def test_a_save_goes_on_after_entries_of_others(run, loss, backend, open_registry):
    hooked = Hooked(backend)
    trainer = open_registry(hooked).run("run")
    trainer.save(small_state(1), step=1, streams={"loss": entries(0, 2)})
    hooked.before = Once("runs/", lambda: loss.append(entries(2, 3)), "put_if_absent")
    trainer.save(small_state(2), step=2, streams={"loss": entries(3, 5)})
    assert hooked.before.done
    assert loss.read() == entries(0, 5)
    assert {n: m.count for n, m in trainer.latest().handle.newest_record().streams.items()} == {
        "loss": 5
    }


def test_an_append_ends_however_many_others_come_first(loss, backend, open_registry, monkeypatch):
    """Ten writers in a row are more than the attempts of an append that merges."""
    monkeypatch.setattr(slots_module, "_LONGEST_PAUSE_S", 0.0)
    loss.append(entries(0, 2))
    hooked = Hooked(backend)
    other, came = open_registry(hooked).run("run").streams["loss"], []

    def come_first(method, key):
        if method == "put_if_absent" and key.startswith("runs/") and len(came) < 10:
            came.append(loss.append({"step": 1000 + len(came)}))

    hooked.before = come_first
    other.append(entries(2, 4))
    assert len(came) == 10
    assert loss.read()[-2:] == entries(2, 4)
    assert loss.count == 14


def test_many_threads_append_at_once(run, backend, open_registry):
    streams = [open_registry(backend).run("run").streams["loss"] for _ in range(4)]

    def append(worker, stream):
        for i in range(8):
            stream.append([{"step": i, "worker": worker}] * 3)

    threads = [
        threading.Thread(target=append, args=(worker, stream))
        for worker, stream in enumerate(streams)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = run.streams["loss"].read()
    for worker in range(4):
        mine = [entry["step"] for entry in found if entry["worker"] == worker]
        assert mine == [i for i in range(8) for _ in range(3)]


@pytest.mark.parametrize("given", [None, "resettable", "forever"])
def test_another_may_begin_the_stream_first(given, loss, backend, open_registry):
    hooked = Hooked(backend)
    other = open_registry(hooked).run("run").streams["loss"]
    begun = {"lifetime": "resettable"}
    hooked.before = Once("runs/", lambda: loss.append(entries(0, 1), **begun), "put_if_absent")
    if given == "forever":
        with pytest.raises(InvalidInput, match="another lifetime"):
            other.append(entries(1, 2), lifetime=given)
    else:
        assert other.append(entries(1, 2), lifetime=given) == 2
    assert hooked.before.done
    assert loss.lifetime == "resettable"


# Lost answers


class Deaf(Wrapper):
    """A store whose answers to puts of slots get lost, `times` times each."""

    times = 0
    reaches = True

    def put_if_absent(self, key, body):
        if not key.startswith("runs/") or not self.times:
            return super().put_if_absent(key, body)
        self.times -= 1
        if self.reaches:
            super().put_if_absent(key, body)
        raise StoreUnavailable("no answer", where=key)


@pytest.fixture
def deaf(backend, run, open_registry, monkeypatch):
    monkeypatch.setattr(slots_module, "_LONGEST_PAUSE_S", 0.0)
    store = Deaf(backend)
    store.stream = open_registry(store).run("run").streams["loss"]
    store.stream.append(entries(0, 2))
    return store


def test_a_lost_answer_is_made_up_for(deaf, loss):
    deaf.times = 1
    assert deaf.stream.append(entries(2, 4)) == 4
    assert loss.read() == entries(0, 4)


@pytest.mark.parametrize("reaches", [True, False])
@pytest.mark.parametrize("between", [0, 1, 30])
def test_a_retry_after_an_unknown_outcome_appends_once(reaches, between, deaf, loss):
    nested = [{"step": 2, "at": [math.nan]}, {"step": 3, "text": "x" * 70_000}]
    deaf.times, deaf.reaches = slots_module._UNKNOWN_RETRIES, reaches
    with pytest.raises(StoreUnavailable, match="no answer"):
        deaf.stream.append(nested)
    deaf.times = 0
    for i in range(between):  # others go on, and merge what is there
        loss.append({"step": 100 + i})
    assert deaf.stream.append(nested) == 4 + between
    assert [entry["step"] for entry in loss.read()].count(3) == 1
    # From here on equal entries are new ones.
    assert deaf.stream.append(nested) == 6 + between


def test_unknown_twice_is_still_appended_once(deaf, loss):
    for reaches in (False, True):
        deaf.times, deaf.reaches = slots_module._UNKNOWN_RETRIES, reaches
        with pytest.raises(StoreUnavailable):
            deaf.stream.append(entries(2, 4))
    deaf.times = 0
    assert deaf.stream.append(entries(2, 4)) == 4
    assert loss.read() == entries(0, 4)


def test_other_entries_are_no_retry(deaf, loss):
    deaf.times, deaf.reaches = slots_module._UNKNOWN_RETRIES, True
    with pytest.raises(StoreUnavailable):
        deaf.stream.append([{"step": 2, "loss": 1}])
    deaf.times = 0
    assert deaf.stream.append([{"step": 2, "loss": 1.0}]) == 4
    assert [type(entry["loss"]) for entry in loss.read(2)] == [int, float]


# Damage


def test_damage_keeps_nobody_from_appending(run, loss, backend, open_registry):
    """The damaged segment stays as it is; what can be read of those after it is merged."""
    loss.append(entries(0, 100))
    loss.append(entries(100, 110))
    damaged, _ = run.manifest.stream("loss").segments
    place = run.manifest.by_manifest[damaged.manifest]
    (pack,) = run.handle.store.placement(place.placement_key).packs
    flip(backend, str(pack.key))
    other = open_registry(backend).run("run").streams["loss"]
    other.append(entries(110, 200))
    segments = run.refresh().manifest.stream("loss").segments
    assert [(one.start, one.count) for one in segments] == [(0, 100), (100, 100)]
    with pytest.raises(Damaged):
        other.read()
    assert other.read(150) == entries(150, 200)


def test_a_segment_with_fewer_entries_than_the_log_says_is_refused(run, loss):
    short = run.handle.committer.writer.write_plain(pack_entries(entries(0, 3)))
    said = AppendStream(
        stream="loss",
        lifetime="forever",
        manifest=short.state.manifest.digest,
        start=0,
        count=4,
        first_step=0,
        last_step=3,
    )
    run.handle.committer.commit(Composed(lambda run: [said], lambda: [short]))
    with pytest.raises(Malformed, match="fewer entries"):
        loss.read()


def test_a_state_that_is_no_segment_is_refused(run, loss):
    other = run.handle.committer.writer.write_plain({"entries": [1, 2, 3]})
    said = AppendStream(
        stream="loss",
        lifetime="forever",
        manifest=other.state.manifest.digest,
        start=0,
        count=3,
        first_step=0,
        last_step=3,
    )
    run.handle.committer.commit(Composed(lambda run: [said], lambda: [other]))
    with pytest.raises(IntegrityError):
        loss.read()


# Cost


@pytest.mark.xdist_group("long history")
def test_a_long_history_is_read_in_a_few_requests(long_history):
    metered = Metered(long_history)
    with open_on(metered) as registry:
        stream = registry.run("long").streams["loss"]
        with metered.measure() as usage:
            found = stream.read()
    assert found == entries(0, SAVES * EACH)
    assert usage.requests <= 13  # is there anything new; three for each of at most four segments


@pytest.mark.xdist_group("long history")
def test_a_long_history_is_read_in_a_few_rounds(long_history):
    clock = Clock()
    with timed(open_on(Timed(long_history, clock)), clock) as registry:
        stream = registry.run("long").streams["loss"]
        # Is anything new; manifests; placements; packs, those of all segments at once.
        assert clock.rounds(stream.read) <= 4


@pytest.mark.xdist_group("long history")
def test_a_part_of_a_long_history_needs_only_its_segments(long_history):
    metered = Metered(long_history)
    last = SAVES * EACH - 1
    with open_on(metered) as registry:
        stream = registry.run("long").streams["loss"]
        with metered.measure() as whole:
            stream.read()
    with open_on(metered) as registry:
        stream = registry.run("long").streams["loss"]
        with metered.measure() as part:
            assert stream.read(last - 9) == entries(last - 9, last + 1)
        with metered.measure() as nothing:
            assert stream.read(last + 1) == []
    assert part.requests <= 4
    assert part.read_bytes < whole.read_bytes / 4
    assert nothing.requests == 1


@pytest.mark.xdist_group("long history")
def test_segments_stay_few(long_history):
    with open_on(long_history) as registry:
        assert len(registry.run("long").manifest.stream("loss").segments) <= 10


def test_many_segments_are_read_in_batches(run, loss, monkeypatch):
    monkeypatch.setattr(stream_appends, "_AT_ONCE", 2)
    monkeypatch.setattr(stream_appends, "merge_count", lambda counts, new, cap: 0)
    for i in range(7):
        loss.append(entries(i, i + 1))
    assert len(run.manifest.stream("loss").segments) == 7
    assert loss.read() == entries(0, 7)


def test_going_back_behind_an_archive_brings_the_stream_of_then_back(run):
    arms = run.streams["arms"]
    arms.append([{"step": step} for step in range(4)], lifetime="resettable")
    before = run.save(small_state(1), step=1)
    arms.append({"step": 4})
    arms.archive("pivot")
    arms.append([{"step": 10}, {"step": 11}])
    after = run.save(small_state(2), step=2)
    assert [entry["step"] for entry in arms.read()] == [10, 11]
    run.restore(at=before)
    run.save(small_state(3), step=3, streams={"arms": [{"step": 20}]})
    assert [entry["step"] for entry in arms.read()] == [0, 1, 2, 3, 20]
    assert [entry["step"] for entry in arms.read(archive="pivot")] == [0, 1, 2, 3, 4]
    assert after.superseded
    run.restore(at=run.latest())
    run.save(small_state(4), step=4)
    assert arms.count == 5
