"""Resumes are compared in a process that has a million objects by now."""

from __future__ import annotations

import gc

import pytest
import torch._dynamo  # as the first optimizer would


@pytest.fixture(autouse=True)
def nothing_else_is_looked_through() -> None:
    """Take all that there is by now away from what a first save looks through for loaders."""
    assert torch._dynamo
    gc.freeze()
