"""Scenarios: a prepared registry, and the actors that are interleaved on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.backends.memory import MemoryBackend
from holdfast.registry.errors import RegistryError, RolledBack
from holdfast.registry.face.registry import Registry
from holdfast.registry.store.store import create_config
from holdfast.registry.upkeep.gc import collect
from tests.schedules.actors import Actor, Ended, Program, named_after
from tests.schedules.ranks import Job
from tests.schedules.soundness import Content, Soundness, Violation, objects_of, opened
from tests.schedules.store import World


@dataclass(frozen=True, slots=True)
class Saved:
    """The result of a program whose checkpoint was acknowledged as durable."""

    run: str
    step: int


@dataclass(frozen=True)
class Scenario:
    """A registry and the actors.

    Attributes:
        prepare: Prepares the registry.
        programs: The actors' programs by their names.
        content: What each checkpoint is saved with.
        refused: Errors that a program may end with, by its name: the documented ones.
        mortal: Actors that may die at any call.
        page: Entries of one page of a listing.
        is_disk: Whether the power may go, and takes every name that was not synced.
        job: The actors that are ranks, and save together.
    """

    prepare: Callable[[Registry], object]
    programs: Mapping[str, Program]
    content: Content
    refused: Mapping[str, tuple[type[Exception], ...]] = field(default_factory=dict)
    mortal: frozenset[str] = frozenset()
    page: int | None = None
    is_disk: bool = False
    job: Job | None = None


class Stage:
    """A scenario set up: where schedules begin, and what is checked where they end.

    Attributes:
        scenario: The scenario.
        actors: Its actors, in the order in which they are tried.
        world: The store before anything.
        soundness: What must hold after every step.
    """

    def __init__(self, scenario: Scenario) -> None:
        backend = MemoryBackend()
        with named_after("before"):
            self.config = create_config(backend, "skipped")
            with opened(backend) as registry:
                scenario.prepare(registry)
        self.scenario = scenario
        self.world = World.of(backend)
        self.world.unsynced = frozenset() if scenario.is_disk else None
        self.actors = [
            Actor(name, program, self.config, scenario.page, is_disk=scenario.is_disk)
            for name, program in scenario.programs.items()
        ]
        self.soundness = Soundness(scenario.content)
        self.soundness.check(self.world)
        self._quiet: set[int] = set()

    def check_end(self, world: World, ended: Sequence[Ended | None]) -> None:
        """Check how a schedule ended; an actor that died has no end.

        Raises:
            Violation: An actor failed, an acknowledged save is lost, what nothing needs is not
                collected, or the registry is not sound.
        """
        for actor, end in zip(self.actors, ended, strict=True):
            if end is not None and end.error is not None:
                if not isinstance(end.error, self._refused(actor.name)):
                    raise Violation(f"{actor.name} failed: {end.error!r}") from end.error
            elif end is not None and isinstance(end.value, Saved):
                self._check_kept(world, actor.name, end.value)
        job = self.scenario.job
        if job is not None:
            names = (actor.name for actor in self.actors)
            job.check(world, dict(zip(names, ended, strict=True)), self.soundness)
        if world.mark not in self._quiet:
            self._check_quiet(world.after_power_loss().copy())
            if job is not None:
                job.retry(world.copy(), swept=len(self.actors) > len(job.ranks))
            self._quiet.add(world.mark)

    @property
    def _is_cut(self) -> bool:
        return any(RolledBack in kinds for kinds in self.scenario.refused.values())

    def _refused(self, name: str) -> tuple[type[Exception], ...]:
        job = self.scenario.job
        if job is not None and name in job.ranks:
            return (RegistryError,)  # `Job.check` looks at it more closely
        return self.scenario.refused.get(name, ())

    def _check_kept(self, world: World, name: str, saved: Saved) -> None:
        state = self.soundness.state(world.after_power_loss(), saved.run)
        kept = [one for one in state.checkpoints if one.step == saved.step and not one.evicted]
        if not kept:
            raise Violation(f"{name} was told that step {saved.step} is saved, and it is lost")

    def _check_quiet(self, world: World) -> None:
        """Check that two collections with nobody about leave what is needed, and nothing else."""
        backend = world.backend()
        with opened(backend) as registry:
            for _ in range(2):
                try:
                    collect(registry.handle.store, grace_s=0.0)
                except RegistryError as error:
                    if isinstance(error, RolledBack) and self._is_cut:
                        return  # somebody cut a log that the collection before had noted
                    raise Violation(f"a quiet collection stops: {error}") from error
        after = World.of(backend)
        self.soundness.check(after)
        left = objects_of(after) - self.soundness.live_objects(after)
        if left:
            raise Violation(f"two collections left {sorted(left)}")
        with opened(backend) as registry:
            findings = registry.verify(deep=True).findings
        errors = [str(one) for one in findings if one.severity == "error"]
        if errors:
            raise Violation(f"verify finds {errors}")
