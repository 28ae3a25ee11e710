"""A TCP proxy on loopback that can go away: connections are refused until it comes back."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit


class TcpProxy:
    """The proxy; a context manager.

    Args:
        behind: URL of the server behind it.

    Attributes:
        url: Its own URL, the same each time it comes back.
    """

    def __init__(self, behind: str) -> None:
        parts = urlsplit(behind)
        assert parts.hostname is not None
        self._behind = (parts.hostname, parts.port)
        self._port = 0
        self._open: list[socket.socket] = []
        self.come_back()
        self.url = f"http://127.0.0.1:{self._port}"

    def come_back(self) -> None:
        """Take connections again."""
        self._listening = socket.create_server(("127.0.0.1", self._port))
        self._port = self._listening.getsockname()[1]
        threading.Thread(target=self._serve, args=(self._listening,), daemon=True).start()

    def go_away(self) -> None:
        """Cut all connections and refuse new ones."""
        # Closing alone does not wake the thread that waits for a connection.
        for one in [self._listening, *self._open]:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        self._open.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.go_away()

    def _serve(self, listening: socket.socket) -> None:
        with suppress(OSError):
            while True:
                asking, _ = listening.accept()
                serving = socket.create_connection(self._behind)
                self._open += [asking, serving]
                for one, other in ((asking, serving), (serving, asking)):
                    threading.Thread(target=_pass_on, args=(one, other), daemon=True).start()


def _pass_on(one: socket.socket, other: socket.socket) -> None:
    with suppress(OSError):
        while data := one.recv(65536):
            other.sendall(data)
    with suppress(OSError):
        other.shutdown(socket.SHUT_WR)
