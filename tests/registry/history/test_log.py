"""The log: appends that lose answers and races, openings through snapshots good and bad."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from holdfast.backends import ObjectInfo, StoreUnavailable
from holdfast.backends.errors import AccessDenied
from holdfast.backends.wrappers import Fault, Faulty, Metered, Wrapper
from holdfast.registry.errors import Conflict, Damaged, Malformed, RolledBack, UnsupportedFormat
from holdfast.registry.history import authorship, slots
from holdfast.registry.history.actions import CreateRun, Mark, SetStatus, TakeOver
from holdfast.registry.history.aside import set_aside, taken_up
from holdfast.registry.history.authorship import commit_line
from holdfast.registry.history.log import SNAPSHOT_EVERY, RunLog
from holdfast.registry.history.replay import RunManifest, advance
from holdfast.registry.history.slots import list_runs
from holdfast.registry.objects.framing import join_lines, split_lines
from holdfast.registry.objects.keys import slot_key, snapshot_key, snapshot_prefix
from holdfast.registry.store.store import Store, read_config
from holdfast.registry.values import canonical
from holdfast.registry.values.digest import Digest
from tests.support.faults import Forgetful, Hooked, Liar, Once, Silent, flip
from tests.support.stores import contents, new_backend

CREATE = CreateRun(config=None, config_hash=Digest.of(b""), seed="0" * 16, environment={})


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(slots.time, "sleep", lambda seconds: None)


@pytest.fixture
def store_on():
    stores = []

    def make(backend) -> Store:
        stores.append(Store(backend, read_config(backend)))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


def status(i: int):
    return SetStatus(status="running" if i % 2 else "interrupted")


def grow(run_log: RunLog, commits: int) -> None:
    for i in range(commits):
        begin = run_log.run.commits == 0
        action = CREATE if begin else TakeOver(token=f"t{i}", host="h")
        run_log.append(lambda run, action=action: [commit_line(run, [action])])


@pytest.fixture
def run_log(backend, store_on):
    found = RunLog(store_on(backend), "r")
    grow(found, 1)
    return found


def reopened(store_on, backend) -> RunLog:
    found = RunLog(store_on(backend), "r")
    found.open()
    return found


# Appending


def test_an_append_puts_exactly_one_slot_and_moves_the_state(run_log, backend):
    before = contents(backend)
    run = run_log.append(lambda run: [commit_line(run, [status(0)])])
    assert run is run_log.run
    assert (run.status, run.next_slot, run.commits) == ("interrupted", 2, 2)
    assert contents(backend).keys() - before.keys() == {slot_key("r", 1)}


def test_nothing_to_do_puts_nothing(run_log, backend):
    before = contents(backend)
    assert run_log.append(lambda run: None) is run_log.run
    assert contents(backend) == before


def test_a_failed_precondition_leaves_everything_as_it_was(run_log, backend):
    before, run = contents(backend), run_log.run

    def refuse(run):
        raise Conflict("no")

    with pytest.raises(Conflict):
        run_log.append(refuse)
    assert contents(backend) == before
    assert run_log.run is run


def test_an_illegal_slot_is_never_put(run_log, backend):
    before = contents(backend)
    with pytest.raises(Malformed, match="not legal"):
        run_log.append(lambda run: [commit_line(RunManifest(run_id="other"), [status(0)])])
    assert contents(backend) == before


def test_each_commit_has_a_write_id_of_its_own(run_log):
    first, second = (commit_line(run_log.run, [status(0)]) for _ in range(2))
    assert first.write != second.write


@pytest.mark.parametrize("after", [True, False])
def test_an_append_whose_answer_is_lost_is_made_once(run_log, backend, store_on, after):
    lost = Faulty(backend, [Fault(1, after=after, error=StoreUnavailable("timeout"))])
    mine = reopened(store_on, lost)
    mine.append(lambda run: [commit_line(run, [status(0)])])
    assert mine.run.commits == 2
    assert reopened(store_on, backend).run.encode() == mine.run.encode()


def test_exists_with_our_own_bytes_is_our_write(run_log, backend, store_on):
    mine = reopened(store_on, Forgetful(backend))
    calls = []

    def compose(run):
        calls.append(run.commits)
        return [commit_line(run, [status(0)])]

    mine.append(compose)
    assert calls == [1]
    assert mine.run.commits == 2


def test_a_lost_race_is_composed_anew_against_the_winners_state(run_log, backend, store_on):
    hooked = Hooked(backend)
    mine = reopened(store_on, hooked)
    hooked.before = Once(
        "runs/r/log/",
        lambda: run_log.append(lambda run: [commit_line(run, [TakeOver(token="w", host="h")])]),
        "put_if_absent",
    )
    seen = []

    def compose(run):
        seen.append(run.writer.token if run.writer else None)
        return [commit_line(run, [status(0)])]

    run = mine.append(compose)
    assert seen == [None, "w"]
    assert (run.next_slot, run.commits, run.writer.token) == (3, 3, "w")
    assert reopened(store_on, backend).run.encode() == run.encode()


def test_a_precondition_is_checked_again_after_a_lost_race(run_log, backend, store_on):
    hooked = Hooked(backend)
    mine = reopened(store_on, hooked)
    hooked.before = Once(
        "runs/r/log/",
        lambda: run_log.append(lambda run: [commit_line(run, [TakeOver(token="w", host="h")])]),
        "put_if_absent",
    )

    def compose(run):
        if run.writer:
            raise Conflict("taken")
        return [commit_line(run, [status(0)])]

    with pytest.raises(Conflict, match="taken"):
        mine.append(compose)
    assert reopened(store_on, backend).run.commits == 2


class Clock:
    """A clock that only pauses and puts move on."""

    def __init__(self) -> None:
        self.now_s, self.pauses = 0.0, []

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.pauses.append((self.now_s, seconds))
        self.now_s += seconds


def racing(monkeypatch, run_log, store_on, backend, wins_after, put_s=0.02):
    """Return a log whose first races are lost, the clock, and the races that it has lost."""
    clock = Clock()
    monkeypatch.setattr(slots, "time", clock)
    monkeypatch.setattr(slots.random, "uniform", lambda _, most: most)
    hooked = Hooked(backend)
    mine = reopened(store_on, hooked)
    lost = []
    monkeypatch.setattr(authorship, "author", lambda: f"winner{len(lost)}@gpu7")

    def win(method, key):
        if method == "put_if_absent" and key.startswith("runs/r/log/") and len(lost) < wins_after:
            lost.append(key)
            clock.now_s += put_s
            run_log.append(lambda run: [commit_line(run, [status(0)])])

    hooked.before = win
    return mine, clock, lost


def test_a_minute_of_lost_races_is_a_conflict_that_names_the_winner(
    run_log, backend, store_on, monkeypatch
):
    mine, clock, lost = racing(monkeypatch, run_log, store_on, backend, math.inf)
    with pytest.raises(Conflict, match=r"in 60 s.*Nothing was committed") as caught:
        mine.append(lambda run: [commit_line(run, [status(1)])])
    assert f"r: lost {len(lost)} races for the next slot" in str(caught.value)
    assert f"the last one went to winner{len(lost)}@gpu7" in str(caught.value)
    assert len(lost) > 60
    assert 60 <= clock.now_s < 61
    # It becomes more patient as long as there seem to be more writers, and tries most in the end.
    early = [pause for at, pause in clock.pauses if at < 2]
    assert early == sorted(early)
    late = [pause for at, pause in clock.pauses if at > 10]
    assert late == sorted(late, reverse=True)
    assert max(pause for _, pause in clock.pauses) < 64 * 0.02
    assert reopened(store_on, backend).run.commits == 1 + len(lost)


def test_a_writer_that_loses_25_races_commits_in_the_end(run_log, backend, store_on, monkeypatch):
    mine, _, lost = racing(monkeypatch, run_log, store_on, backend, 25)
    mine.append(lambda run: [commit_line(run, [status(1)])])
    assert len(lost) == 25
    assert reopened(store_on, backend).run.commits == 27


def test_races_lost_to_a_collector_name_it(run_log, backend, store_on):
    hooked = Hooked(backend)
    mine = reopened(store_on, hooked)

    def win(method, key):
        if method == "put_if_absent" and key.startswith("runs/r/log/"):
            run_log.append(lambda run: [Mark(epoch=1)])

    hooked.before = win
    with pytest.raises(Conflict, match="a collector or a repack"):
        mine.append(lambda run: [commit_line(run, [status(1)])], patience_s=0.05)


def test_an_outcome_that_stays_unknown_is_tried_at_the_same_slot_and_then_told(
    run_log, backend, store_on
):
    silent = Silent(backend)
    mine = reopened(store_on, silent)
    before, run = contents(backend), mine.run
    with pytest.raises(StoreUnavailable):
        mine.append(lambda run: [commit_line(run, [status(0)])])
    assert len(silent.asked) > 1
    assert set(silent.asked) == {slot_key("r", 1)}
    assert contents(backend) == before
    assert mine.run is run


def test_a_store_that_was_patient_long_enough_is_not_asked_again(
    run_log, backend, store_on, monkeypatch
):
    silent = Silent(backend)
    monkeypatch.setattr(slots, "_UNKNOWN_S", -1.0)
    with pytest.raises(StoreUnavailable):
        mine = reopened(store_on, silent)
        mine.append(lambda run: [commit_line(run, [status(0)])])
    assert silent.asked == [slot_key("r", 1)]


def test_after_an_unknown_outcome_the_next_append_finds_what_landed(run_log, backend, store_on):
    class LandsSilently(Wrapper):
        deaf = True

        def put_if_absent(self, key, body):
            created = super().put_if_absent(key, body)
            if self.deaf:
                raise StoreUnavailable("timeout")
            return created

        def get(self, key, byte_range=None, *, into=None):
            if self.deaf and key == slot_key("r", 1):
                raise StoreUnavailable("timeout")
            return super().get(key, byte_range, into=into)

    deaf = LandsSilently(backend)
    mine = reopened(store_on, deaf)
    with pytest.raises(StoreUnavailable):
        mine.append(lambda run: [commit_line(run, [status(0)])])
    deaf.deaf = False
    run = mine.append(lambda run: [commit_line(run, [status(1)])])
    assert run.commits == 3


def test_a_store_that_says_exists_and_gives_nothing_is_not_believed(run_log, backend, store_on):
    mine = reopened(store_on, Liar(backend))
    with pytest.raises(StoreUnavailable, match="unknown whether the commit landed"):
        mine.append(lambda run: [commit_line(run, [status(0)])])


def test_other_errors_of_the_store_come_through_at_once(run_log, backend, store_on):
    mine = reopened(store_on, Faulty(backend, [Fault(1, error=AccessDenied("no"))]))
    with pytest.raises(AccessDenied):
        mine.append(lambda run: [commit_line(run, [status(0)])])
    assert reopened(store_on, backend).run.commits == 1


# Reading


def test_refreshing_when_nothing_is_new_costs_one_request(run_log, backend, store_on):
    metered = Metered(backend)
    mine = reopened(store_on, metered)
    with metered.measure() as usage:
        assert mine.refresh() is mine.run
    assert usage.requests == 1


def test_refreshing_reads_to_the_head(run_log, backend, store_on):
    mine = reopened(store_on, backend)
    grow(run_log, 5)
    assert mine.refresh().encode() == run_log.run.encode()


def test_a_run_without_slots_is_empty(backend, store_on):
    assert RunLog(store_on(backend), "none").open().commits == 0


def test_a_gap_is_malformed_and_names_the_slot(run_log, backend, store_on):
    grow(run_log, 4)
    backend.delete(slot_key("r", 2))
    with pytest.raises(Malformed, match="r: the log has a gap; expected slot 2; found slot 3"):
        reopened(store_on, backend)


def test_a_listing_that_appends_overtake_is_no_gap(run_log, backend, store_on):
    """A folder that grows while it is read may show a file and not the one put before it."""
    grow(run_log, 5)

    class Overtaken(Wrapper):
        def list(self, prefix="", **more):
            left_out = {slot_key("r", 1), slot_key("r", 3)}
            yield from (info for info in super().list(prefix, **more) if info.key not in left_out)

    mine = reopened(store_on, Overtaken(backend))
    assert mine.run.encode() == run_log.run.encode()


def test_a_log_without_its_beginning_is_a_gap(run_log, backend, store_on):
    grow(run_log, 1)
    backend.delete(slot_key("r", 0))
    with pytest.raises(Malformed, match="expected slot 0; found slot 1"):
        reopened(store_on, backend)


def test_a_listed_slot_that_is_absent_is_malformed(run_log, backend, store_on):
    class Ghosts(Wrapper):
        def list(self, prefix="", **more):
            yield from super().list(prefix, **more)
            if prefix == "runs/r/log/":
                yield ObjectInfo(slot_key("r", 1), 10, 0.0)

    with pytest.raises(Malformed, match=f"{slot_key('r', 1)}: a listed slot is absent"):
        reopened(store_on, Ghosts(backend))


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.soak)])
def test_every_flipped_bit_of_a_slot_is_noticed(run_log, backend, store_on, every):
    grow(run_log, 2)
    key = slot_key("r", 1)
    original = backend.get(key)
    for bit in range(0, len(original) * 8, 7 * every):
        flip(backend, key, bit)
        with pytest.raises((Damaged, Malformed, UnsupportedFormat), match=key):
            reopened(store_on, backend)
        backend.put(key, original)


def test_slots_are_given_from_any_place(run_log):
    grow(run_log, 4)
    assert [slot.number for slot in run_log.slots()] == [0, 1, 2, 3, 4]
    assert [slot.number for slot in run_log.slots(3)] == [3, 4]
    assert [slot.number for slot in run_log.slots(5)] == []


def test_runs_are_sorted_by_name(backend, store_on):
    store = store_on(backend)
    for name in ("b", "a", "a.b", "a-c"):
        grow(RunLog(store, name), 1)
    assert list_runs(store) == ["a", "a-c", "a.b", "b"]


def test_runs_are_listed_by_their_folders(backend, store_on):
    store = store_on(backend)
    assert list_runs(store) == []
    grow(RunLog(store, "r"), 2)
    assert list_runs(store) == ["r"]


# Snapshots


def snapshots(backend) -> list[str]:
    return [info.key for info in backend.list(snapshot_prefix("r"))]


@pytest.fixture
def long_log(run_log):
    grow(run_log, 2 * SNAPSHOT_EVERY + 5)
    return run_log


def full_replay(store_on, backend) -> RunManifest:
    return advance(RunManifest(run_id="r"), RunLog(store_on(backend), "r").slots())


def test_a_snapshot_is_written_every_8_slots(backend, store_on, long_log):
    assert SNAPSHOT_EVERY == 8
    assert snapshots(backend) == [snapshot_key("r", 15), snapshot_key("r", 7)]


def test_a_training_that_ends_leaves_a_snapshot_unless_its_log_is_very_short(run_log, backend):
    def end(status):
        run_log.append(lambda run: [commit_line(run, [SetStatus(status=status)])])

    grow(run_log, 1)
    end("interrupted")
    assert snapshots(backend) == []
    end("failed")
    assert snapshots(backend) == [snapshot_key("r", 3)]
    grow(run_log, 3)
    end("running")
    assert len(snapshots(backend)) == 1
    end("completed")
    assert snapshots(backend) == [snapshot_key("r", 8), snapshot_key("r", 3)]


def test_opening_through_a_snapshot_of_the_newest_slot_is_four_requests(run_log, backend, store_on):
    grow(run_log, 3 * SNAPSHOT_EVERY - 1)
    newest, calls = 3 * SNAPSHOT_EVERY - 1, []
    mine = RunLog(store_on(Metered(backend, calls)), "r")
    calls.clear()
    mine.open()
    assert sorted((call.method, call.key) for call in calls) == [
        ("get", slot_key("r", newest)),
        ("get", snapshot_key("r", newest)),
        ("list", "runs/r/log/"),
        ("list", snapshot_prefix("r")),
    ]


def test_opening_through_a_snapshot_is_a_full_replay(backend, store_on, long_log):
    grow(long_log, 200)
    mine = reopened(store_on, backend)
    assert mine.run.commits > 200
    assert mine.run.encode() == full_replay(store_on, backend).compact().encode()
    assert mine.run.encode() == long_log.run.encode()


def test_opening_reads_no_slot_before_the_newest_snapshot(backend, store_on, long_log):
    calls = []
    reopened(store_on, Metered(backend, calls))
    got = sorted(call.key for call in calls if call.method == "get" and "/log/" in call.key)
    assert got == [slot_key("r", slot) for slot in range(15, long_log.run.next_slot)]
    assert sum(call.method == "list" for call in calls) == 2


def test_snapshots_may_be_deleted_at_any_time(backend, store_on, long_log):
    mine = reopened(store_on, backend)
    for key in snapshots(backend):
        backend.delete(key)
    assert reopened(store_on, backend).run.encode() == mine.run.encode()


def test_a_run_that_is_only_marked_gets_snapshots_too(run_log, backend, store_on):
    """A finished run is marked by every sweep, for ever; opening it must not get dearer."""
    for _ in range(SNAPSHOT_EVERY):
        run_log.append(lambda run: [Mark(epoch=1)])
    assert len(snapshots(backend)) == 1
    run_log.append(lambda run: [Mark(epoch=2)])
    calls = []
    assert reopened(store_on, Metered(backend, calls)).run.epoch == 2
    assert len([call for call in calls if "/log/" in call.key and call.method == "get"]) < 10


def test_a_snapshot_that_cannot_be_written_costs_nothing(run_log, backend, store_on):
    class NoSnapshots(Wrapper):
        def put(self, key, body):
            raise StoreUnavailable("no", where=key)

    mine = reopened(store_on, NoSnapshots(backend))
    grow(mine, 70)
    assert mine.run.commits == 71
    assert snapshots(backend) == []


def _header(data: bytes, **changes):
    header, _ = split_lines(data, where="x")
    return canonical.encode({**canonical.decode(header, where="x"), **changes})


def _body(data: bytes, **changes) -> bytes:
    _, body = split_lines(data, where="x")
    return canonical.encode({**canonical.decode(body, where="x"), **changes})


NEWEST = snapshot_key("r", 15)
MANGLED = {
    "empty": lambda data: b"",
    "cut": lambda data: data[:-1],
    "noise": lambda data: b"noise" * 50,
    "other format": lambda data: join_lines(
        [_header(data, format="x/1"), _body(data, status="failed")]
    ),
    "older replay version": lambda data: join_lines(
        [_header(data, replay=0), _body(data, status="failed")]
    ),
    "newer replay version": lambda data: join_lines(
        [_header(data, replay=99), _body(data, status="failed")]
    ),
    "another slot's header": lambda data: join_lines(
        [_header(data, slot=14), _body(data, status="failed")]
    ),
    "another log's slot": lambda data: join_lines(
        [_header(data, slot_digest="0" * 64), _body(data, status="failed")]
    ),
    "another slot's body": lambda data: join_lines([_header(data), _body(data, next_slot=15)]),
    "another run's": lambda data: join_lines([_header(data), _body(data, run_id="other")]),
    "another head": lambda data: join_lines([_header(data), _body(data, head="0" * 64)]),
    "unknown field": lambda data: join_lines([_header(data), _body(data, more=1)]),
    "one line": lambda data: join_lines([_header(data)]),
    "three lines": lambda data: join_lines([_header(data), _body(data), _body(data)]),
    "not canonical": lambda data: join_lines([_header(data), b" " + _body(data)]),
}


@pytest.mark.parametrize("mangle", MANGLED.values(), ids=MANGLED.keys())
@pytest.mark.parametrize("all_of_them", [False, True])
def test_a_snapshot_that_cannot_be_trusted_is_ignored(
    backend, store_on, long_log, mangle, all_of_them
):
    mangled = mangle(backend.get(NEWEST))
    for key in snapshots(backend) if all_of_them else [NEWEST]:
        backend.put(key, mangled)
    assert reopened(store_on, backend).run.encode() == long_log.run.encode()


def test_every_flipped_bit_of_a_snapshot_is_harmless(backend, store_on, long_log):
    original = backend.get(NEWEST)
    for bit in range(0, len(original) * 8, len(original) // 3):
        flip(backend, NEWEST, bit)
        assert reopened(store_on, backend).run.encode() == long_log.run.encode()
        backend.put(NEWEST, original)


@pytest.mark.parametrize("name", ["notes.txt", "0", snapshot_key("r", 10**6).split("/")[-1]])
def test_other_files_among_the_snapshots_are_ignored(backend, store_on, long_log, name):
    backend.put(f"runs/r/snapshots/{name}", backend.get(NEWEST))
    assert reopened(store_on, backend).run.encode() == long_log.run.encode()


def test_a_snapshot_of_another_history_of_the_run_is_ignored(backend, store_on, long_log):
    other = new_backend()
    grow(RunLog(store_on(other), "r"), 20)
    backend.put(NEWEST, other.get(NEWEST))
    assert reopened(store_on, backend).run.encode() == long_log.run.encode()


def test_a_handle_opened_through_a_snapshot_goes_on_appending(backend, store_on, long_log):
    mine = reopened(store_on, backend)
    grow(mine, SNAPSHOT_EVERY)
    assert len(snapshots(backend)) == 3
    assert mine.run.encode() == full_replay(store_on, backend).compact().encode()


def test_a_log_that_was_set_aside_goes_on_without_a_request(backend, store_on, run_log):
    calls = []
    store = store_on(Metered(backend, calls))
    log = RunLog(store, run_log.run_id)
    log.read_to(log.length())
    log.check_head()
    log.append(lambda run: None)  # nothing but a look
    calls.clear()
    aside = set_aside(log)
    other = taken_up(store, log.run_id, aside)
    assert calls == []
    assert (other.run, other.newest_commit) == (log.run.compact(), log.newest_commit)
    assert set_aside(other) == aside
    other.append(lambda run: [Mark(epoch=1)])
    assert other.run.next_slot == log.run.next_slot + 1
    assert log.refresh() == other.run
    empty = RunLog(store, "other")
    assert taken_up(store, "other", set_aside(empty)).run == empty.run
    # A log that was replaced meanwhile gets no further slot (W4).
    backend.delete(slot_key(log.run_id, other.run.next_slot - 1))
    with pytest.raises(RolledBack):
        taken_up(store, log.run_id, set_aside(other)).append(lambda run: [Mark(epoch=2)])


def test_two_lost_races_cost_no_pause_and_each_further_one_doubles_it(monkeypatch):
    now, pauses = [100.0], []

    def sleep(seconds):
        pauses.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(slots, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    monkeypatch.setattr(slots, "random", SimpleNamespace(uniform=lambda least, most: most))
    races = slots.Races(patience_s=1000.0)
    for lost in range(1, 5):
        now[0] += 1.0  # an attempt
        assert races.lose()
        assert races.lost == lost
    assert pauses == pytest.approx([2.0, 4.0], rel=0.01)
    now[0] += 1000.0
    assert not races.lose()
