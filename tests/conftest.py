"""What all tests share."""

import pytest

pytest_plugins = ["tests.servers.fixtures"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the storm: it takes a minute of waiting, which the other tests fill."""
    items.sort(key=lambda item: "tests/storm/" not in item.nodeid)
