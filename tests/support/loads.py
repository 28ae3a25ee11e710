"""Which checkpoints a run lists, and which of them do not load."""

from __future__ import annotations

import pytest

from holdfast.registry.errors import IntegrityError


def refused(backend, open_registry, match: str, kind: type = IntegrityError) -> None:
    """Check that the newest checkpoint of the run does not load, and why."""
    with pytest.raises(kind, match=match):
        open_registry(backend).checkpoint("run").load()


def steps(run) -> list[int]:
    """Return the steps of a run's checkpoints."""
    return [checkpoint.step for checkpoint in run.checkpoints()]
