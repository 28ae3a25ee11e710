"""A real browser: Debian's Chromium, driven by Playwright. One for all tests of a file."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A browser; its tests belong to the xdist group `browser`.

    While it is open, Playwright's event loop counts as running in this thread, and other tests
    could not use `asyncio.run`. So it is closed after each file.
    """
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("chromium is not installed (Debian package chromium)")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as started:
        # The sandbox of the browser does not work for root and in most containers.
        found = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield found
        found.close()
