"""Checkpoints that load, and those that do not."""

from __future__ import annotations

import pytest

from registry.errors import (
    IntegrityError,
)


def refused(backend, open_registry, match: str, kind: type = IntegrityError) -> None:
    with pytest.raises(kind, match=match):
        open_registry(backend).checkpoint("run").load()


def steps(run) -> list[int]:
    return [checkpoint.step for checkpoint in run.checkpoints()]
