"""What explores schedules: it counts them right, and remembers of programs what they do."""

from __future__ import annotations

from math import comb

import pytest

from tests.schedules.actors import Actor, NotRepeatable, Session
from tests.schedules.explore import Explorer
from tests.schedules.live import play
from tests.schedules.plays import MIXES, REQUIRED, content
from tests.schedules.scenario import Scenario, Stage
from tests.schedules.soundness import Soundness, Violation
from tests.schedules.store import Request


def looking(times: int):
    """Return a program of so many calls."""

    def look(session: Session) -> None:
        session.ready()
        for number in range(times):
            assert list(session.backend.list(f"nothing-{number}/")) == []

    return look


def explorer_of(mortal: tuple[str, ...] = (), **times: int) -> Explorer:
    programs = {name: looking(number) for name, number in times.items()}
    return Explorer(Stage(Scenario(lambda _: None, programs, content, mortal=frozenset(mortal))))


@pytest.mark.parametrize(("n", "m"), [(1, 1), (2, 3), (5, 4)])
def test_schedules_are_counted_as_arithmetic_has_it(n: int, m: int) -> None:
    explorer = explorer_of(a=n, b=m)
    assert explorer.exhaust(0).schedules == 2
    # The first one is left between two of its calls, for the other one's end.
    assert explorer.exhaust(1).schedules == 2 + (n - 1) + (m - 1)
    assert explorer.exhaust(n + m).schedules == comb(n + m, n)


def test_three_actors_in_any_order() -> None:
    explorer = explorer_of(a=1, b=2, c=3)
    assert explorer.exhaust(0).schedules == 6
    assert explorer.exhaust(6).schedules == comb(6, 1) * comb(5, 2)


def test_an_actor_dies_at_any_call_or_at_none() -> None:
    explorer = explorer_of(mortal=("a",), a=3, b=1)
    # Alive: two orders. Dead after its first or second call, before or after the other one.
    assert explorer.exhaust(0).schedules == 2 + 2 * 2


@pytest.mark.parametrize("name", ["another run", "after a sweep", "a collector dies", "repack"])
def test_what_is_remembered_of_programs_is_what_they_do_in_threads(name: str) -> None:
    stage = Stage((REQUIRED | MIXES)[name]())
    explorer = Explorer(stage)
    for seed in range(3):
        course = explorer.wander(seed)
        played = play(stage, course.moves)
        assert played.calls == course.calls
        assert played.world.objects == course.world.objects
        assert list(map(repr, played.ended)) == list(map(repr, course.ended))


def test_a_course_is_replayed() -> None:
    course = Explorer(Stage(REQUIRED["another run"]())).wander(5)
    again = Explorer(Stage(REQUIRED["another run"]())).replay(course.moves)
    assert (again.calls, again.world.mark) == (course.calls, course.world.mark)


def test_a_program_that_depends_on_more_than_its_answers_is_noticed() -> None:
    times = iter(range(100))

    def fickle(session: Session) -> None:
        for _ in range(3):
            list(session.backend.list(f"{next(times)}/"))

    actor = Actor("fickle", fickle, Stage(Scenario(lambda _: None, {}, content)).config)
    with pytest.raises(NotRepeatable, match="list 1/ in place of list 0/"):
        actor.after(actor.first, ())


# What is looked at after every step


@pytest.fixture
def stage() -> Stage:
    return Stage(REQUIRED["another run"]())


@pytest.mark.parametrize("kind", ["packs", "manifests", "placements"])
def test_an_object_that_is_gone_is_noticed(stage: Stage, kind: str) -> None:
    for key in [key for key in stage.world.objects if key.startswith(kind)]:
        world = stage.world.copy()
        world.carry_out(Request("delete", key))
        with pytest.raises(Violation, match=f"{kind}/.* is gone"):
            stage.soundness.check(world)


@pytest.mark.parametrize("kind", ["packs", "manifests", "placements"])
def test_an_object_of_other_bytes_is_noticed(stage: Stage, kind: str) -> None:
    for key in [key for key in stage.world.objects if key.startswith(kind)]:
        world = stage.world.copy()
        found = world.objects[key].data
        world.carry_out(Request("put", key, found[:-1] + bytes([found[-1] ^ 1])))
        with pytest.raises(Violation):
            stage.soundness.check(world)


def test_another_state_than_was_saved_is_noticed(stage: Stage) -> None:
    soundness = Soundness(lambda run_id, step: {"model": "another"})
    with pytest.raises(Violation, match="something else than was saved"):
        soundness.check(stage.world)


def test_what_is_left_over_is_noticed(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.schedules.scenario.collect", lambda *_, **__: None)
    world = stage.world.copy()
    orphan = next(key for key in world.objects if key.startswith("packs"))
    world.carry_out(Request("put", f"{orphan}7", world.objects[orphan].data))
    with pytest.raises(Violation, match="two collections left"):
        stage.check_end(world, [None] * len(stage.actors))


def test_a_save_that_is_lost_is_noticed(stage: Stage) -> None:
    explorer = Explorer(stage)
    course = explorer.wander(0)
    with pytest.raises(Violation, match="told that step 3 is saved, and it is lost"):
        stage.check_end(stage.world, course.ended)
