"""Which checkpoints a run lists, and which of them do not load."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import pytest

import holdfast
from holdfast import Checkpoint, Digest, Registry, Run
from holdfast.backends import Backend
from holdfast.registry.errors import IntegrityError, RegistryError
from holdfast.registry.objects.keys import PROBES
from tests.support.states import same


def refused(
    backend: Backend,
    open_registry: Callable[[Backend], Registry],
    match: str,
    kind: type[RegistryError] = IntegrityError,
) -> None:
    """Check that the newest checkpoint of the run does not load, and why."""
    with pytest.raises(kind, match=match):
        open_registry(backend).checkpoint("run").load()


def steps(run: Run) -> list[int]:
    """Return the steps of a run's checkpoints."""
    return [checkpoint.step for checkpoint in run.checkpoints()]


def steps_at(url: str | Path | None, run: str) -> list[int]:
    """Return the steps of a run's checkpoints, by a new handle of its registry."""
    with holdfast.open(url) as opened:
        return steps(opened.run(run))


def check_states(reg: Registry, expected: Callable[[Checkpoint], object]) -> None:
    """Check that a registry is whole, and that each checkpoint is what it is expected to be."""
    check_verified(reg)
    for name in reg.run_names():
        for checkpoint in reg.run(name).checkpoints():
            assert same(checkpoint.load(), expected(checkpoint)), checkpoint.ref


def steps_of(following: Iterator[Checkpoint]) -> list[int]:
    """Return the steps that a follower gets; one that repeats itself ends, too."""
    return [checkpoint.step for checkpoint in islice(following, 20)]


def actions_of(run: Run) -> list[list[str]]:
    """Return the kinds of what each commit says."""
    return [[action.action for action in commit.actions] for commit in run.history.commits()]


def components(reg: Registry, name: str) -> dict[int, dict[str, Digest]]:
    """Return the components of each checkpoint of a run, by step."""
    return {one.step: one.components for one in reg.run(name).checkpoints()}


def check_verified(registry: Registry, why: object = None) -> None:
    """Check that nothing is wrong; who died asking for the time has left a file of a probe."""
    findings = registry.verify(deep=True).findings
    assert [one for one in findings if not one.where.startswith(PROBES)] == [], why
