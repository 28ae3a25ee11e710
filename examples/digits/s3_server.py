"""An S3 server for the demonstration: moto on a free port of 127.0.0.1, everything in memory.

Prints its address and serves until its standard input ends, so that it never outlives whoever
started it. moto checks first and acts then; taken one by one, two writers cannot both win.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server


class _Quiet(WSGIRequestHandler):
    # With HTTP/1.0 nobody answers `Expect: 100-continue`, and each upload waits for a second.
    protocol_version = "HTTP/1.1"

    def log_request(self, *args: object) -> None:
        """Say nothing."""


def main() -> None:
    """Serve."""
    application = DomainDispatcherApplication(create_backend_app)
    turn = threading.Lock()

    def one_at_a_time(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        with turn:
            return list(application(environ, start))

    server = make_server("127.0.0.1", 0, one_at_a_time, threaded=True, request_handler=_Quiet)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"http://127.0.0.1:{server.port}", flush=True)
    sys.stdin.read()
    server.shutdown()


if __name__ == "__main__":
    main()
