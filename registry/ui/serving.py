"""A bounded HTTP server on one socket: what the pages and the endpoint for clients share."""

from __future__ import annotations

import asyncio
import secrets
import socket

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from holdfast.registry.errors import InvalidInput

HOST = "127.0.0.1"
#: Seconds for unfinished answers when the server stops: a browser that stopped reading must not
#: keep it for ever.
_LAST_ANSWERS_S = 2
#: Seconds within which a connection must send a whole request, with its body.
_REQUEST_WITHIN_S = 10.0
#: Maximum number of connections. A new one replaces the one that waits longest for a request.
_CONNECTIONS = 128
#: Connections that are accepted before any of them is read, at most: few enough that the oldest of
#: them is not replaced before its request could be seen.
_ACCEPTED_AT_ONCE = 32


class Listener:
    """A bound socket, and the server that answers on it; port 0 is any that is free."""

    def __init__(self, host: str, port: int) -> None:
        self._socket = _bound(host, port)
        self.port: int = self._socket.getsockname()[1]
        self._server: uvicorn.Server | None = None
        self._stops = False

    def serve(self, app: ASGIApp, *, log_level: str = "warning") -> None:
        """Answer requests until SIGINT or SIGTERM comes, or `stop` is called."""
        self._server = _Server(
            uvicorn.Config(
                app,
                log_level=log_level,
                access_log=False,
                lifespan="off",
                http=Connection,
                ws="none",
                backlog=_ACCEPTED_AT_ONCE,
                proxy_headers=False,
                timeout_graceful_shutdown=_LAST_ANSWERS_S,
            )
        )
        self._server.should_exit = self._stops
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self._socket.close()

    def stop(self) -> None:
        """Stop the server: `serve` returns."""
        self._stops = True
        if self._server is not None:
            self._server.should_exit = True


class _Server(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, with a longer queue of the system than what is accepted at once."""
        await super().startup(sockets)
        for one in sockets or ():
            one.listen(_CONNECTIONS)


class Connection(H11Protocol):
    """A connection with a time limit, since other users of the machine can open any number."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time for the first request; abort a connection if there are too many."""
        super().connection_made(transport)
        self._set_deadline()
        still = [one for one in self.connections if not one.transport.is_closing()]
        if len(still) > _CONNECTIONS:
            waiting = [
                (one._deadline.when(), id(one), one)
                for one in still
                if isinstance(one, Connection) and one._deadline is not None
            ]
            min(waiting)[2].transport.abort()

    def data_received(self, data: bytes) -> None:
        """Read on."""
        super().data_received(data)
        self._set_deadline()

    def on_response_complete(self) -> None:
        """Start the time for the next request."""
        super().on_response_complete()
        self._set_deadline()

    def _set_deadline(self) -> None:
        """Start the time for a request; end it when a whole one is being answered."""
        runs = self.cycle is not None and not self.cycle.response_complete
        runs = runs and self.conn.their_state is not h11.SEND_BODY
        if runs and self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        elif not runs and self._deadline is None:
            self._deadline = self.loop.call_later(_REQUEST_WITHIN_S, self.transport.abort)


def _bound(host: str, port: int) -> socket.socket:
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
        found.listen(_CONNECTIONS)
    except OSError as error:
        found.close()
        raise InvalidInput(
            "the port cannot be used",
            where=f"{host}:{port}",
            found=error,
            hint="Choose another --port, or none for any that is free.",
        ) from error
    return found


def loopback_hosts(port: int) -> frozenset[str]:
    """Return the values of `Host` by which programs of this machine ask for a port."""
    ends = (f":{port}", "") if port == 80 else (f":{port}",)  # browsers omit the port of HTTP
    return frozenset(name + end for name in ("127.0.0.1", "localhost", "[::1]") for end in ends)


def is_same(given: str, secret: str) -> bool:
    """Compare two secrets in constant time."""
    return secrets.compare_digest(given.encode(), secret.encode())
