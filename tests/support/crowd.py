"""Strangers who open more connections than a server keeps."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress


@contextmanager
def crowd(port: int, request: str) -> Iterator[None]:
    """Send one request many times on each of many connections."""
    data = f"{request} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode() * 500
    with ExitStack() as opened:
        for _ in range(132):
            there = opened.enter_context(socket.create_connection(("127.0.0.1", port), 300))
            with suppress(ConnectionError):  # it was answered and closed already
                there.sendall(data)
        yield
