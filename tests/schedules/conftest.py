"""Every test of this package plays programs whose clocks stand still."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.schedules.actors import determined


@pytest.fixture(autouse=True)
def _determined() -> Iterator[None]:
    with determined():
        yield
