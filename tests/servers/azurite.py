"""Azurite, Microsoft's emulator of Azure's blobs, on a free port of this machine.

It honours `If-None-Match: *`. The program is an npm package: `npm install --global azurite`.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from tests.servers.process import free_port, start, wait_for_http

# Where npm put it, if that is not on the path.
PROGRAM = "HOLDFAST_AZURITE"
ACCOUNT = "holdfast"
# Base64 of "no secret, a key for tests".
KEY = "bm8gc2VjcmV0LCBhIGtleSBmb3IgdGVzdHM="


@dataclass(frozen=True)
class Azurite:
    """A running emulator.

    Attributes:
        endpoint_url: Its address, the account included.
        pid: Its process.
    """

    endpoint_url: str
    pid: int

    @property
    def connection_string(self) -> str:
        return (
            f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};"
            f"BlobEndpoint={self.endpoint_url};"
        )


def program() -> str | None:
    return os.environ.get(PROGRAM) or shutil.which("azurite-blob")


def start_azurite(command: str, folder: Path) -> Azurite:
    """Start one that keeps everything in memory; takes about a second."""
    port = free_port()
    os.environ["AZURITE_ACCOUNTS"] = f"{ACCOUNT}:{KEY}"
    try:
        pid = start(
            [
                *(shutil.which(command) or command, "--blobHost", "127.0.0.1"),
                *("--blobPort", str(port), "--inMemoryPersistence", "--silent"),
                *("--skipApiVersionCheck", "--disableTelemetry"),
            ],
            folder / "azurite.out",
        )
    finally:
        del os.environ["AZURITE_ACCOUNTS"]
    wait_for_http(f"http://127.0.0.1:{port}")
    return Azurite(f"http://127.0.0.1:{port}/{ACCOUNT}", pid)
