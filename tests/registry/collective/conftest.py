from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.registry.collective.fleet import Fleet


@pytest.fixture(scope="session")
def fleet() -> Iterator[Fleet]:
    """Processes that are ranks; started at their first use."""
    made = Fleet()
    yield made
    made.close()
