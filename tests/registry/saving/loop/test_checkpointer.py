"""When a checkpointer saves, what it stores, and how it leaves a loop; in this process."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from holdfast import Monitor, Stopping, Storing
from holdfast.backends.errors import StoreUnavailable
from holdfast.distributed import PerRank, ThreadGroup
from holdfast.registry.errors import Conflict, InvalidInput, RankFailed
from holdfast.registry.saving.loop import checkpointer as cadence
from holdfast.registry.saving.loop import notice
from holdfast.registry.saving.loop.notice import told
from holdfast.registry.saving.loop.stopping import Deadline
from holdfast.registry.spec import RunSpec
from holdfast.registry.spec.run_spec import Signals
from tests.support.faults import Gate, Hooked, Once, Silent
from tests.support.loads import steps
from tests.support.processes import send

LOSS = Monitor(metric="loss", mode="min")


def state(step: int) -> dict[str, object]:
    return {"model": {"w": np.full(100, step)}, "step": step}


def whys(run) -> list[tuple[int, str]]:
    return [(one.step, told(one.meta).get("why", "")) for one in run.checkpoints()]


@pytest.fixture(autouse=True)
def handlers(sigint_is_heard: None) -> Iterator[None]:
    """Check that a test leaves the handlers as they were."""
    kinds = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = {kind: signal.getsignal(kind) for kind in kinds}
    yield
    assert {kind: signal.getsignal(kind) for kind in kinds} == before
    assert signal.set_wakeup_fd(-1) == -1


# When it saves


@pytest.mark.parametrize(
    ("taken", "saved"),
    [
        (range(1, 8), [3, 6, 7]),
        (range(8), [3, 6, 7]),  # step 0 is a multiple of everything, and nothing has happened yet
        ([2, 4, 8, 9, 10], [4, 8, 9, 10]),  # 3 was passed between 2 and 4
        ([7, 8], [8]),
        ([9], [9]),
    ],
)
def test_it_saves_where_a_multiple_was_reached_or_passed_and_at_the_end(run, taken, saved):
    with run.checkpointer(every_steps=3) as checkpointer:
        for step in taken:
            checkpointer.step(step, state(step))
    assert steps(run) == saved
    assert all(one.load()["step"] == one.step for one in run.checkpoints())


def test_a_resumed_training_keeps_its_cadence(run, backend, open_registry):
    run.save(state(5), step=5)
    other = open_registry(backend).run("run")
    assert other.restore().checkpoint.step == 5
    with other.checkpointer(every_steps=4, save_at_end=False) as checkpointer:
        for step in (7, 9, 10):  # 8 is passed
            checkpointer.step(step, state(step))
    assert steps(other) == [5, 9]


def test_it_saves_by_the_clock(run, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(cadence, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with run.checkpointer(every_s=10, background=False, save_at_end=False) as checkpointer:
        for step in range(1, 9):
            now[0] += 4
            checkpointer.step(step, state(step))
    assert steps(run) == [3, 6]  # 12 s, and 12 s after that


def test_the_presets_cadence_is_the_default(reg, tmp_path):
    preset = tmp_path / "mine.toml"
    preset.write_text(
        'format = "holdfast.preset/1"\n[[phases]]\nname = "a"\nsave_every = 2\n'
        '[[phases]]\nname = "b"\nsave_every = 3\n'
    )
    run = reg.create_run("own", preset=preset)
    for phase, expected in (("a", [2, 4]), ("b", [2, 4, 3, 6])):
        named = None if phase == "a" else phase  # the first phase is the default
        with run.checkpointer(phase=named, save_at_end=False) as checkpointer:
            for step in range(1, 7 if phase == "b" else 5):
                checkpointer.step(step, state(step))
        assert steps(run) == expected
    assert [one.phase for one in run.checkpoints()] == ["a", "a", "b", "b"]


def test_the_best_metric_and_convergence_save(reg):
    run = reg.create_run("run", monitor=LOSS)
    run.save(state(1), step=1, metrics={"loss": 0.5})
    losses = {2: 0.6, 3: 0.4, 4: float("nan"), 5: 0.4, 6: 0.3, 7: 0.35}
    with run.checkpointer(on_best=True) as checkpointer:
        for step, loss in losses.items():
            saved = checkpointer.step(step, state(step), {"loss": loss}, converged=step == 7)
        assert saved.done()  # what has converged is durable before the call returns
    assert whys(run) == [(1, ""), (3, "best"), (6, "best"), (7, "converged")]


def test_the_first_value_of_a_metric_is_the_best_so_far(run):
    with run.checkpointer(on_best=LOSS, save_at_end=False) as checkpointer:
        checkpointer.step(1, state(1))
        checkpointer.step(2, state(2), {"loss": 7.0})
    assert steps(run) == [2]


def test_a_state_is_only_made_when_it_is_saved(run):
    made = []

    def make(step: int) -> dict[str, object]:
        made.append(step)
        return state(step)

    with run.checkpointer(every_steps=2) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.step(step, lambda step=step: make(step))
    assert (made, steps(run)) == ([2, 3], [2, 3])


def test_an_exception_saves_nothing_more(run):
    with pytest.raises(ValueError, match="bug"), run.checkpointer(every_steps=2) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.step(step, state(step))
        raise ValueError("bug")
    assert steps(run) == [2]


def test_entries_of_steps_that_are_not_saved_wait_for_the_next_save(backend, open_registry):
    gate = Gate(backend)
    run = open_registry(gate).create_run("run")
    with run.checkpointer(every_steps=2, busy="skip") as checkpointer:
        for step in range(1, 6):
            saved = checkpointer.step(step, state(step), streams={"loss": [{"step": step}]})
            if step == 4:
                assert saved.outcome == "skipped"
        gate.open.set()
    assert steps(run) == [2, 5]
    assert [entry["step"] for entry in run.streams["loss"].read()] == [1, 2, 3, 4, 5]


def test_the_meta_tells_why_and_what_it_cost(run):
    with run.checkpointer(every_steps=1, every_s=60, background=False) as checkpointer:
        for step in (1, 2):
            checkpointer.step(step, state(step), meta={"lr": 0.5})
        assert 0 < checkpointer.waited_share < 1
    first, second = (one.meta for one in run.checkpoints())
    assert first["lr"] == 0.5
    told = second["checkpointer"]
    assert (told["why"], told["every_steps"], told["every_s"]) == ("cadence", 1, 60)
    assert 0 < told["waited_s"] < told["ran_s"]


def test_the_error_of_a_save_in_the_background_ends_the_loop(backend, open_registry):
    run = open_registry(Silent(backend, "packs/")).create_run("run")
    taken = []
    with pytest.raises(Exception, match="no answer"), run.checkpointer(every_steps=1) as it:
        for step in range(1, 5):
            taken.append(step)
            it.step(step, state(step))
    assert taken == [1, 2]
    assert steps(run) == []


# What it refuses


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("every_steps", 0),
        ("every_steps", 2.5),
        ("every_s", float("nan")),
        ("every_s", -1),
        ("on_best", "loss"),
        ("busy", "never"),
        ("stopping", 25),
        ("storing", "zstd"),
        ("may_fail", 1.5),
    ],
)
def test_a_setting_that_is_none_is_refused_by_name(run, option, value):
    with pytest.raises(InvalidInput, match=option):
        run.checkpointer(**{option: value})


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("notice", 5),
        ("exit_code", 256),
        ("sigint_exit_code", True),
        ("sigusr1", "later"),
        ("deadline_s", 0),
        ("barrier_s", float("inf")),
    ],
)
def test_a_way_to_stop_that_is_none_is_refused_by_name(option, value):
    with pytest.raises(InvalidInput, match=option):
        Stopping(**{option: value})


def test_ranks_and_monitors_that_are_none_are_refused(run):
    with (
        pytest.raises(InvalidInput, match="ranks"),
        run.checkpointer(stopping=Stopping(ranks=object())),
    ):
        pass
    with pytest.raises(InvalidInput, match="best"), run.checkpointer(on_best=True):
        pass


def test_steps_grow_and_meta_keeps_its_key(run):
    with run.checkpointer(save_at_end=False) as checkpointer:
        checkpointer.step(3, state(3))
        with pytest.raises(InvalidInput, match="a step after 3"):
            checkpointer.step(3, state(3))
        with pytest.raises(InvalidInput, match="meta"):
            checkpointer.step(4, state(4), meta={"checkpointer": 1})
    assert steps(run) == []


def test_wrong_entries_are_refused_where_they_are_given(run):
    with run.checkpointer() as checkpointer:
        with pytest.raises(InvalidInput, match="entries"):
            checkpointer.step(1, state(1), streams={"loss": [{"loss": 1}]})
        with pytest.raises(InvalidInput, match="streams are not a mapping"):
            run.save(state(1), step=1, streams=[{"step": 1}])
        with pytest.raises(InvalidInput, match="streams are not a mapping"):
            checkpointer.step(2, state(2), streams=[{"step": 2}])
        with pytest.raises(InvalidInput, match="companions are not a mapping"):
            run.save(state(1), step=1, companions=[state(1)])
        checkpointer.step(3, state(3), streams={"loss": [{"step": 3}]})
    assert [entry["step"] for entry in run.streams["loss"].read()] == [3]


def test_a_checkpointer_works_in_its_block_only(run):
    checkpointer = run.checkpointer()
    assert (checkpointer.stop_requested, checkpointer.stopped) == (False, False)
    with pytest.raises(InvalidInput, match="not open"):
        checkpointer.step(1, state(1))
    with checkpointer:
        checkpointer.step(1, state(1))
    with pytest.raises(InvalidInput, match="not open"):
        checkpointer.step(2, state(2))
    assert steps(run) == [1]


# Leaving


def leave(run, at: dict[int, int], background: bool = True, **stopping) -> list[int]:
    """Take steps and get signals during some of them; return the steps that were begun."""
    taken = []
    with run.checkpointer(
        every_steps=10, background=background, stopping=Stopping(**stopping)
    ) as checkpointer:
        for step in range(1, 8):
            taken.append(step)
            if step in at:
                send(at[step])
                send(at[step])
            checkpointer.step(step, state(step))
            if checkpointer.stopped:
                break
    return taken


@pytest.mark.parametrize("by_preset", [True, False])
@pytest.mark.parametrize("background", [True, False])
def test_sigterm_finishes_the_step_saves_it_and_leaves(reg, by_preset, background):
    own = RunSpec(name="own", signals=Signals(exit_code=0, sigint_exit_code=3))
    run = reg.create_run("run", preset=own if by_preset else None)
    with pytest.raises(SystemExit) as left:
        leave(run, {4: signal.SIGTERM}, background=background)  # twice: the second one is harmless
    assert left.value.code == (0 if by_preset else 143)
    assert whys(run.refresh()) == [(4, "signal")]
    assert run.status == "interrupted"


def test_what_is_asked_here_wins_over_the_preset(reg):
    run = reg.create_run("run", preset=RunSpec(name="own", signals=Signals(exit_code=0)))
    with pytest.raises(SystemExit) as left:
        leave(run, {4: signal.SIGTERM}, exit_code=7)
    assert left.value.code == 7


def test_one_sigint_leaves_like_sigterm(run):
    with pytest.raises(SystemExit) as left, run.checkpointer() as checkpointer:
        send(signal.SIGINT)
        checkpointer.step(1, state(1))
    assert (left.value.code, steps(run), run.refresh().status) == (130, [1], "interrupted")


def test_a_second_sigint_interrupts_at_once_and_nothing_is_saved(run):
    with pytest.raises(KeyboardInterrupt):
        leave(run, {4: signal.SIGINT})
    assert steps(run) == []


def test_a_step_that_was_just_saved_is_not_saved_twice(run):
    commits = run.manifest.commits
    with pytest.raises(SystemExit), run.checkpointer(every_steps=1) as checkpointer:
        send(signal.SIGTERM)
        checkpointer.step(1, state(1))
    assert run.refresh().manifest.commits == commits + 2  # the save, the status


def test_a_block_can_be_left_without_systemexit(run):
    with run:
        assert leave(run, {4: signal.SIGTERM}, exits=False) == [1, 2, 3, 4]
    assert steps(run) == [4]
    assert run.refresh().status == "interrupted"  # although the block of the run ended as usual


def test_a_signal_after_the_last_step_still_counts(run):
    with pytest.raises(SystemExit), run.checkpointer() as checkpointer:
        checkpointer.step(1, state(1))
        send(signal.SIGTERM)
    assert (steps(run), run.refresh().status) == ([1], "interrupted")


def test_a_signal_during_the_last_save_still_counts(backend, open_registry):
    hooked = Hooked(backend)
    run = open_registry(hooked).create_run("run")
    with pytest.raises(SystemExit) as left, run.checkpointer() as checkpointer:
        checkpointer.step(1, state(1))
        hooked.before = Once("packs/", lambda: send(signal.SIGTERM))
    assert (left.value.code, steps(run), run.refresh().status) == (143, [1], "interrupted")


class Interrupting:
    """Ranks that are interrupted at the very end, when nobody looks at requests any more."""

    rank = 0

    def highest(self, value: int) -> int:
        send(signal.SIGINT)
        return value


def test_a_signal_after_the_last_look_reaches_the_handler_from_before(run):
    looking = run.checkpointer(stopping=Stopping(ranks=Interrupting()), save_at_end=False)
    with pytest.raises(KeyboardInterrupt), looking:  # by Python's own handler
        pass
    assert looking.stop_requested


def test_a_step_that_fails_after_a_signal_interrupts_the_run(run):
    with pytest.raises(RuntimeError, match="worker"), run, run.checkpointer() as checkpointer:
        checkpointer.step(1, state(1))
        send(signal.SIGTERM)
        raise RuntimeError("a worker was killed")
    assert run.refresh().status == "interrupted"


def test_sigusr1_saves_after_the_step_and_continues(run):
    assert leave(run, {3: signal.SIGUSR1, 5: signal.SIGUSR1}) == list(range(1, 8))
    assert whys(run) == [(3, "signal"), (5, "signal"), (7, "end")]


def test_sigusr1_can_wait_for_the_cadence_and_is_then_never_skipped(backend, open_registry):
    gate = Gate(backend)
    run = open_registry(gate).create_run("run")
    with run.checkpointer(
        every_steps=3, stopping=Stopping(sigusr1="at_cadence"), busy="skip"
    ) as checkpointer:
        for step in range(1, 11):
            if step == 4:
                send(signal.SIGUSR1)
            if step == 6:
                threading.Timer(0.05, gate.open.set).start()
            checkpointer.step(step, state(step))
    found = whys(run)
    assert found[:2] == [(3, "cadence"), (6, "signal")]  # 6 has waited for 3


def test_a_completed_run_is_refused_at_the_first_step(run, caplog):
    with run, run.checkpointer(every_steps=100) as checkpointer:
        checkpointer.step(1, state(1))
    run.restore()
    assert "run.status = 'running'" in caplog.text
    with run.checkpointer() as checkpointer, pytest.raises(Conflict, match="completed"):
        checkpointer.step(2, state(2))
    run.status = "running"
    with run, run.checkpointer(every_steps=100) as checkpointer:
        checkpointer.step(2, state(2))
    assert steps(run) == [1, 2]


@pytest.mark.parametrize("kind", ["file", "callable"])
def test_a_notice_counts_as_sigterm(run, tmp_path, kind, monkeypatch, caplog):
    monkeypatch.setattr(notice, "_EVERY_S", 0.0)
    path = tmp_path / "preempted"
    source = path if kind == "file" else path.exists
    with (
        pytest.raises(SystemExit) as left,
        run.checkpointer(stopping=Stopping(notice=source)) as checkpointer,
    ):
        for step in range(1, 6):
            if step == 3:
                path.touch()
            checkpointer.step(step, state(step))
    assert (left.value.code, steps(run), run.refresh().status) == (143, [3], "interrupted")
    asked, left_with = caplog.messages
    assert "asked to stop (a notice of preemption); saving after this step" in asked
    assert left_with == f"{run.id}: step 3 is durable; exiting"


def test_a_notice_is_asked_once_a_second_and_may_fail(run, monkeypatch, caplog):
    now, asked = [0.0], []
    monkeypatch.setattr(notice, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def ask() -> object:
        asked.append(now[0])
        raise OSError("no metadata server")

    with run.checkpointer(stopping=Stopping(notice=ask), save_at_end=False) as checkpointer:
        for step in range(1, 9):
            now[0] += 0.5
            checkpointer.step(step, state(step))
    assert asked == [0.5, 1.5, 2.5, 3.5]
    assert sum("no metadata server" in one.getMessage() for one in caplog.records) == 1


def test_a_stop_takes_along_the_entries_of_a_save_that_failed(backend, open_registry, caplog):
    gate = Gate(backend)
    gate.open.set()
    run = open_registry(gate).create_run("run")
    with pytest.raises(SystemExit), run.checkpointer(every_steps=2) as checkpointer:
        for step in range(1, 6):
            gate.error = StoreUnavailable("away") if step == 4 else None
            if step == 5:
                send(signal.SIGTERM)
            saved = checkpointer.step(step, state(step), streams={"loss": [{"step": step}]})
            while saved is not None and not saved.done():
                time.sleep(0.01)
    assert "an earlier save failed" in caplog.text
    assert steps(run) == [2, 5]
    assert [entry["step"] for entry in run.streams["loss"].read()] == [1, 2, 3, 4, 5]


def test_a_stop_saves_the_last_step_after_two_saves_that_failed(backend, open_registry):
    hooked, is_open = Hooked(backend), threading.Event()
    run = open_registry(hooked).create_run("run")

    def fail(method: str, key: str) -> None:
        if key.startswith("packs/"):
            assert is_open.wait(300)
            raise StoreUnavailable("away")

    hooked.before = fail
    with (
        pytest.raises(SystemExit),
        run.checkpointer(every_steps=1, busy="supersede") as checkpointer,
    ):
        saved = [checkpointer.step(step, state(step)) for step in (1, 2)]
        is_open.set()
        run.handle.saver.pipeline.wait(60)
        hooked.before = lambda method, key: None
        send(signal.SIGTERM)
        checkpointer.step(3, state(3), streams={"loss": [{"step": 3}]})
    assert [one.outcome for one in saved] == ["failed", "failed"]
    assert (steps(run), run.refresh().status) == ([3], "interrupted")


# Ranks


class Talking:
    """Two ranks in threads of this process."""

    def __init__(self, rank: int, barrier: threading.Barrier, said: list[int]) -> None:
        self.rank, self._barrier, self._said = rank, barrier, said

    def highest(self, value: int) -> int:
        self._said[self.rank] = value
        self._barrier.wait(300)
        found = max(self._said)
        self._barrier.wait(300)
        return found


def train_on_ranks(
    runs, stop_at: int, gather=lambda rank, step: state(step), converges: int = 0, **options: object
) -> list[object]:
    """Train on two ranks; at a step only the second one is told to stop. Return how each ended."""
    barrier, said = threading.Barrier(2), [0, 0]
    ended: list[object] = [None, None]

    def train(rank: int) -> None:
        ranks = Talking(rank, barrier, said)
        told = [False]
        try:
            with runs[rank].checkpointer(
                every_steps=2, stopping=Stopping(ranks=ranks, notice=lambda: told[0]), **options
            ) as checkpointer:
                for step in range(1, 8):
                    told[0] = rank == 1 and step == stop_at
                    has_converged = rank == 0 and step == converges
                    checkpointer.step(
                        step, lambda step=step: gather(rank, step), converged=has_converged
                    )
        except BaseException as error:
            ended[rank] = error

    threads = [threading.Thread(target=train, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    return ended


@pytest.fixture
def together(run, backend, open_registry):
    """Return the handles of two ranks that save together."""
    groups = ThreadGroup.make(2, deadline_s=20)
    return [open_registry(backend).run("run", group=one) for one in groups]


@pytest.mark.parametrize("background", [True, False])
def test_ranks_that_save_together_decide_together(run, together, monkeypatch, background):
    monkeypatch.setattr(notice, "_EVERY_S", 0.0)

    begin, begun = Deadline.begin, list[int]()
    monkeypatch.setattr(Deadline, "begin", lambda self, n: (begun.append(n), begin(self, n)))

    def own(rank: int, step: int) -> dict[str, object]:
        return {**state(step), "own": PerRank(10 * rank)}

    ended = train_on_ranks(together, stop_at=5, gather=own, background=background)
    assert [getattr(error, "code", error) for error in ended] == [143, 143]
    assert whys(run) == [(2, "cadence"), (4, "cadence"), (5, "signal")]
    assert run.latest().load(only="own") == {"own": {0: 0, 1: 10}}
    assert begun.count(signal.SIGTERM) == 2, "only the rank that was asked has a deadline"
    assert run.status == "interrupted"


@pytest.mark.parametrize(
    "option", [{"busy": "skip"}, {"storing": Storing(precision="bf16")}, {"stopping": Stopping()}]
)
def test_settings_that_ranks_cannot_share_are_refused(together, option):
    with pytest.raises(InvalidInput, match="(?i)" + next(iter(option))):
        together[0].checkpointer(**option).__enter__()


@pytest.mark.parametrize("background", [True, False])
def test_ranks_leave_at_one_boundary_and_only_the_first_saves(
    run, backend, open_registry, monkeypatch, background
):
    monkeypatch.setattr(notice, "_EVERY_S", 0.0)
    other = open_registry(backend).run("run")
    ended = train_on_ranks([run, other], stop_at=5, background=background)
    assert [getattr(error, "code", error) for error in ended] == [143, 143]
    assert steps(run) == [2, 4, 5]
    assert run.refresh().status == "interrupted"
    assert run.manifest.commits == 1 + 3 + 1


@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("broken", [0, 1])
def test_a_rank_that_cannot_gather_its_state_stops_all(
    run, backend, open_registry, request, broken, groups
):
    runs = [run, open_registry(backend).run("run")]
    if groups:
        runs = request.getfixturevalue("together")

    def gather(rank: int, step: int) -> dict[str, object]:
        if rank == broken and step == 4:
            raise OSError("gone")
        return state(step)

    ended = train_on_ranks(runs, stop_at=9, background=False, gather=gather)
    assert isinstance(ended[broken], OSError)
    assert isinstance(ended[1 - broken], RankFailed if groups else Conflict)
    assert getattr(ended[1 - broken], "rank", broken) == broken
    assert steps(run)[:1] == [2]


def test_only_the_first_ranks_metrics_count(run, backend, open_registry):
    other = open_registry(backend).run("run")
    ended = train_on_ranks([run, other], stop_at=9, converges=5)
    assert ended == [None, None]
    assert whys(run) == [
        (2, "cadence"),
        (4, "cadence"),
        (5, "converged"),
        (6, "cadence"),
        (7, "end"),
    ]


def test_if_the_first_rank_cannot_save_the_others_stop_too(backend, open_registry, monkeypatch):
    monkeypatch.setattr(notice, "_EVERY_S", 0.0)
    run = open_registry(Silent(backend, "packs/")).create_run("run")
    other = open_registry(backend).run("run")
    first, second = train_on_ranks([run, other], stop_at=9, background=False)
    assert "no answer" in str(first)
    assert isinstance(second, Conflict)
    assert "another rank could not save" in str(second)
