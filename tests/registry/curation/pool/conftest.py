"""A run with an opponent pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from holdfast import Checkpoint, Registry, Run
from tests.registry.curation.pool.league import LEAGUE, player


@pytest.fixture
def run(reg: Registry) -> Run:
    return reg.create_run("run", seed=42, preset=LEAGUE)


@pytest.fixture
def save(run: Run) -> Callable[..., Checkpoint]:
    """Saves the player of a step into the run, in phase 3."""

    def save(step: int, /, phase: int = 3, **options: Any) -> Checkpoint:
        return run.save(player(step), step=step, phase=phase, **options)

    return save
