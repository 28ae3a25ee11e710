"""The figures of this process for Prometheus: on a port, or in a file of its collector."""

from __future__ import annotations

import atexit
import logging
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from holdfast.backends.errors import install_extra
from holdfast.registry.errors import InvalidInput, RegistryError
from holdfast.registry.saving.journal import Journal, run_folders
from holdfast.registry.values import HERE, METRICS, Figures

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Metric

_LOGGER = logging.getLogger("holdfast")
_ADDRESS = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([\w.-]*)):(\d{1,5})")
_EVERY_S = 15.0  # between two files
_PREFIX = "holdfast_"


class Export:
    """Shows the figures of this process, at `:PORT`, `HOST:PORT` or in a file `*.prom`."""

    url: str | None = None  # where it listens

    def __init__(
        self, target: str | os.PathLike[str], *, runs: bool, journal: Journal | None = None
    ) -> None:
        self._path, self._journal = os.fspath(target), journal
        self._pid, self._over = os.getpid(), Event()
        address = _ADDRESS.fullmatch(self._path)
        if address is None and not self._path.endswith(".prom"):
            raise InvalidInput(
                "not a place for metrics",
                where=self._path,
                expected=":PORT, HOST:PORT, or a path that ends in .prom",
            )
        try:
            self._shown = _shown(lambda: _families(runs, HERE, self._waiting()))
            if address is None:
                self._begin_file(Path(self._path))
            else:
                self._listen(address[1] or address[2] or "127.0.0.1", int(address[3]))
        except ModuleNotFoundError as error:
            hint = install_extra("metrics")
            raise InvalidInput("a library is missing", where=error.name, hint=hint) from error
        except (OSError, OverflowError) as error:
            raise InvalidInput(
                "this place cannot be used for metrics", where=self._path, found=error
            ) from error

    def close(self) -> None:
        """Write the file a last time, or stop listening."""
        atexit.unregister(self.close)
        if self._over.is_set() or self._pid != os.getpid():  # a forked process has no thread of it
            return
        self._over.set()
        if self.url is not None:
            self._server.shutdown()
            self._server.server_close()
        self._thread.join()

    def _listen(self, host: str, port: int) -> None:
        from prometheus_client import ProcessCollector, start_http_server

        ProcessCollector(registry=self._shown)
        self._server, self._thread = start_http_server(port, host, self._shown)
        name = f"[{host}]" if ":" in host else host
        self.url = f"http://{name}:{self._server.server_port}/metrics"

    def _begin_file(self, file: Path) -> None:
        """Go on with the counts of an earlier process, or Prometheus would see no increase."""
        from prometheus_client import write_to_textfile
        from prometheus_client.parser import text_string_to_metric_families

        text = file.read_text(errors="replace") if file.exists() else ""
        if text and not text.startswith(f"# HELP {_PREFIX}"):
            raise InvalidInput("the file holds no metrics of Holdfast", where=file)
        with suppress(ValueError, LookupError):  # an unreadable file starts again at zero
            for family in text_string_to_metric_families(text):
                for one in family.samples:
                    HERE.go_on(one.name.removeprefix(_PREFIX), one.labels, one.value)
        write_to_textfile(str(file), self._shown)
        self._thread = Thread(target=self._rewrite, name="holdfast-metrics", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def _rewrite(self) -> None:
        from prometheus_client import write_to_textfile

        is_over = False
        while not is_over:
            is_over = self._over.wait(_EVERY_S)
            try:
                write_to_textfile(self._path, self._shown)
            except OSError as error:  # a training goes on without it
                _LOGGER.warning("%s: the metrics cannot be written: %s", self._path, error)

    def _waiting(self) -> Figures:
        """Return the figures of what waits in the journal."""
        found = Figures()
        for _, folder in () if self._journal is None else run_folders(self._journal):
            with suppress(RegistryError, OSError):  # another process writes it
                backlog, run = folder.backlog(), folder.run_id
                found.add("journal_waiting_saves", backlog.entries, run=run)
                found.add("journal_waiting_bytes", backlog.size_bytes, run=run)
                if (oldest_ms := backlog.oldest_ms) is not None:
                    found.put("journal_oldest_timestamp_seconds", oldest_ms / 1e3, run=run)
                for one in ("refused", "stranded", "damaged"):
                    count = getattr(backlog, one)
                    found.add("journal_outside_saves", count, outcome=one, run=run)
        return found


def exposition(figures: Figures) -> bytes:
    """Return figures in the text format of Prometheus; no run is named."""
    from prometheus_client import generate_latest

    return generate_latest(_shown(lambda: _families(False, figures)))


def _shown(families: Any) -> CollectorRegistry:
    from prometheus_client import CollectorRegistry

    shown = CollectorRegistry()
    shown.register(type("Collector", (), {"collect": staticmethod(families)})())
    return shown


def _families(runs: bool, *sources: Figures) -> Iterator[Metric]:
    from prometheus_client import Metric

    for name, of in ((name, of) for one in sources for name, of in one.read(runs=runs).items()):
        about, labels = METRICS[name]
        kind = "counter" if name.endswith("_total") else "gauge"
        family = Metric((_PREFIX + name).removesuffix("_total"), about, kind)
        for values, value in of.items():
            named = zip(labels, values, strict=False)  # without its runs, the last label
            family.add_sample(_PREFIX + name, dict(named), value)
        yield family
