"""Serve moto's S3 on a free port, one request at a time, and print the port.

moto checks and then acts, so that two of many concurrent exclusive creates may win. Taken one by
one they cannot; whoever tests what must survive a racy store makes one of his own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server


class _Quiet(WSGIRequestHandler):
    # Without HTTP/1.1 the server would never answer `Expect: 100-continue`, which costs a second.
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a body would wait 40 ms for the receipt of its head

    def log_request(self, *args: object) -> None:
        """Say nothing."""


def moto() -> Callable[..., Any]:
    """Return all of moto as one application."""
    application = DomainDispatcherApplication(create_backend_app)
    # It would list its own folders on the disk twice for every request.
    application.get_backend_for_host = cache(application.get_backend_for_host)
    return application


def serve(application: Callable[..., Any]) -> None:
    """Serve an application on a free port for ever; print the port."""
    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=_Quiet)
    print(server.port, flush=True)
    server.serve_forever()


def main() -> None:
    application = moto()
    turn = threading.Lock()

    def one_at_a_time(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        with turn:
            return list(application(environ, start))

    serve(one_at_a_time)


if __name__ == "__main__":
    main()
