"""Which checkpoints a run lists, and which of them do not load."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import pytest

from holdfast import Checkpoint, Digest, Registry, Run
from holdfast.registry.errors import IntegrityError


def refused(backend, open_registry, match: str, kind: type = IntegrityError) -> None:
    """Check that the newest checkpoint of the run does not load, and why."""
    with pytest.raises(kind, match=match):
        open_registry(backend).checkpoint("run").load()


def steps(run) -> list[int]:
    """Return the steps of a run's checkpoints."""
    return [checkpoint.step for checkpoint in run.checkpoints()]


def steps_of(following: Iterator[Checkpoint]) -> list[int]:
    """Return the steps that a follower gets; one that repeats itself ends, too."""
    return [checkpoint.step for checkpoint in islice(following, 20)]


def actions_of(run: Run) -> list[list[str]]:
    """Return the kinds of what each commit says."""
    return [[action.action for action in commit.actions] for commit in run.history()]


def components(reg: Registry, name: str) -> dict[int, dict[str, Digest]]:
    """Return the components of each checkpoint of a run, by step."""
    return {one.step: one.components for one in reg.run(name).checkpoints()}
