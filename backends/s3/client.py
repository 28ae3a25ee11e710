"""Make the client of the SDK, with connections that another thread can cut.

The SDK sends each request once. `backend` retries, since it knows which answers to accept and when
to stop. The SDK repeats a request only to follow an answer that names the bucket's region.
"""

from __future__ import annotations

import io
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import botocore.session
from botocore import UNSIGNED
from botocore.awsrequest import (
    AWSHTTPConnection,
    AWSHTTPConnectionPool,
    AWSHTTPSConnection,
    AWSHTTPSConnectionPool,
)
from botocore.config import Config
from botocore.loaders import Loader, create_loader

from holdfast.backends.errors import InvalidLocation
from holdfast.backends.location import Location
from holdfast.backends.patience import Patience
from holdfast.backends.s3.proof import check_raw
from holdfast.backends.s3.settings import S3Settings
from holdfast.backends.waiting import Wait, current

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client


def make_client(
    location: Location, patience: Patience, connections: int, settings: S3Settings
) -> S3Client:
    """Make a client for a bucket.

    Args:
        location: The bucket, and options for the client.
        patience: How long to wait.
        connections: The most open connections.
        settings: Credentials and options of the user.

    Raises:
        InvalidLocation: The SDK does not accept this location.
    """
    endpoint = location.endpoint_url or _endpoint_of_environment()
    try:
        session = botocore.session.Session(profile=settings.profile)
        models = _models(session.get_config_variable("data_path"))
        session.register_component("data_loader", models)
        client = session.create_client(
            "s3",
            endpoint_url=location.endpoint_url,
            region_name=location.region,
            config=_config(endpoint, patience, connections, settings),
            **settings.client,
        )
    except ValueError as error:
        raise InvalidLocation(str(error), where=location.url) from error
    client.meta.events.register("before-parse.s3", _before_parse)
    client.meta.events.register("before-call.s3.PutObject", _send_at_once)
    # The SDK has no option for this. It finds its classes of connections in this table, also for
    # proxies. A test that cuts a connection fails if a version of the SDK has another table.
    session_of_http = cast("Any", client)._endpoint.http_session
    session_of_http._pool_classes_by_scheme.update(http=_Pool, https=_TlsPool)
    return cast("S3Client", client)


@cache
def _models(search_path: str | None) -> Loader:
    """Return the descriptions of AWS's services; parsing them is the slowest part of a client."""
    return create_loader(search_path)


def _endpoint_of_environment() -> str | None:
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")


def _config(
    endpoint: str | None, patience: Patience, connections: int, settings: S3Settings
) -> Config:
    # Each body has our checksum. TLS protects it; without TLS the body's SHA-256 is signed.
    signed = endpoint is not None and endpoint.startswith("http://")
    given = dict(settings.config)
    if settings.anonymous:
        given["signature_version"] = UNSIGNED
    ours = Config(
        # One for each thread of a registry; otherwise urllib3 warns and reconnects.
        max_pool_connections=connections,
        connect_timeout=patience.connect_s,
        # Bounds each wait for bytes; `holdfast.backends.waiting` bounds their sum.
        read_timeout=patience.try_s,
        tcp_keepalive=True,
        retries={"mode": "standard", "total_max_attempts": 1},
        s3=cast(
            "Any",
            {
                "addressing_style": "path" if endpoint else "auto",
                "payload_signing_enabled": signed,
                **settings.addressing,
            },
        ),
        # The callers check a SHA-256 of all bytes that they read.
        response_checksum_validation="when_required",
        user_agent_extra="holdfast",
    )
    return ours.merge(Config(**given))


def _before_parse(operation_model: Any, response_dict: dict[str, Any], **_: object) -> None:
    check_raw(
        operation_model.name,
        response_dict["status_code"],
        response_dict["headers"],
        response_dict["body"],
    )


def _send_at_once(params: dict[str, Any], **_: object) -> None:
    """Send a small body without asking first, which would take a round trip.

    The SDK makes a file of bytes, and asks (`Expect: 100-continue`) before it sends a file.
    """
    if isinstance(params["body"], io.BytesIO):
        params["body"] = params["body"].getvalue()


class _CountedSocket:
    """A socket whose file counts the bytes that a response reads."""

    def __init__(self, sock: Any, wait: Wait | None) -> None:
        self._sock = sock
        self._wait = wait

    def makefile(self, mode: str) -> Any:
        if self._wait is None:
            return self._sock.makefile(mode)
        return io.BufferedReader(_CountedFile(self._sock.makefile(mode, buffering=0), self._wait))


class _CountedFile(io.RawIOBase):
    def __init__(self, raw: io.RawIOBase, wait: Wait) -> None:
        self._raw = raw
        self._wait = wait

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int | None:
        count = self._raw.readinto(buffer)
        self._wait.moved(count or 0)
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Connection:
    """Mixin for the connections of the SDK: another thread can cut them."""

    sock: Any
    response_class: Any
    _wait: Wait | None = None
    # After "Connection: close" the response still uses the socket that the connection dropped.
    _answering: Any = None

    def connect(self) -> None:
        self._held()
        super().connect()  # type: ignore[misc]

    def request(self, *args: Any, **options: Any) -> Any:
        self._answering = None
        self._held()
        return super().request(*args, **options)  # type: ignore[misc]

    def getresponse(self, *args: Any, **options: Any) -> Any:
        self._answering = self.sock
        # Chosen by the SDK for each request.
        chosen: Callable[..., Any] = self.response_class

        def counted(sock: Any, **options: Any) -> Any:
            return chosen(_CountedSocket(sock, self._wait), **options)

        self.response_class = counted
        try:
            return super().getresponse(*args, **options)  # type: ignore[misc]
        finally:
            self.response_class = chosen

    def cut(self, wait: Wait) -> None:
        """Cut the connection from another thread, if it serves `wait`."""
        if self._wait is not wait:
            return  # it is back in the pool or serves another call
        found = self.sock or self._answering
        # For TLS within TLS, through a proxy, this is an object around the socket.
        plain = getattr(found, "socket", found)
        if isinstance(plain, socket.socket):
            # Not the method of a TLS socket, after which the reader would continue without TLS.
            with suppress(OSError):
                socket.socket.shutdown(plain, socket.SHUT_RDWR)

    def _held(self) -> None:
        self._wait = wait = current()
        if wait is not None:
            wait.hold(self)

    def _consume_headers(self, fp: Any) -> None:
        """Skip the headers of "100 Continue"; the SDK's loop would not end with the connection."""
        while fp.readline() not in (b"\r\n", b"\n", b""):
            pass


class _PlainConnection(_Connection, AWSHTTPConnection):  # type: ignore[misc]
    pass


class _TlsConnection(_Connection, AWSHTTPSConnection):  # type: ignore[misc]
    pass


class _Pool(AWSHTTPConnectionPool):
    ConnectionCls = _PlainConnection


class _TlsPool(AWSHTTPSConnectionPool):
    ConnectionCls = _TlsConnection
