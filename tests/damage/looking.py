"""Everything that looks at a registry, called one after another; whatever it says must be typed."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from click.testing import CliRunner
from typer.main import get_command

import registry
from backends.memory import MemoryBackend
from registry.cli.app import app
from registry.errors import RegistryError
from registry.registry import Registry
from tests.crash.inline import InlinePools
from tests.damage.forging import CALM, FORGED, FORK

_NAME = "forged"
#: Made once: it takes as long as most of the commands.
_APP = get_command(app)
URL = f"memory://{_NAME}"

#: What a valid question may end with: an answer, a name that is none any more, damage, a format.
_STATUSES = {0, 4, 6, 8}
_COMMANDS = (
    *(("run", "ls"), ("ls",), ("du",), ("verify", "--deep"), ("gc", "--dry-run")),
    *(("repack", "--dry-run"), ("run", "show", FORGED), ("ls", FORGED, "--evicted")),
    *(("log", FORGED), ("log", FORK, "--graph"), ("show", FORGED), ("show", FORGED, "--tensors")),
    *(("show", f"{FORGED}/releases/latest"), ("show", f"{FORGED}/artifacts/bank")),
    *(("show", f"{FORGED}/pool/v0001"), ("diff", f"{FORGED}/gates/good", FORGED)),
    *(
        ("stats", FORGED),
        ("prune", FORGED, "--dry-run", "--last", "1"),
        ("pool", "ls", FORGED, "--all"),
    ),
    *(("pool", "sample", FORGED), ("gate", "ls", FORGED), ("release", "ls", FORGED)),
    *(("release", "show", FORGED, "1.0.0"), ("artifact", "ls", FORGED)),
    *(("stream", "ls", FORGED), ("stream", "read", FORGED, "rows")),
)


@dataclass
class Looks:
    """Looks at forged registries.

    Attributes:
        faults: What was said otherwise than it should be: a call, and what came of it.
        refused: Calls that ended with a typed error.
        answered: Calls that gave an answer.
    """

    faults: list[str] = field(default_factory=list)
    refused: int = 0
    answered: int = 0

    def at(self, files: dict[str, bytes], case: str) -> None:
        """Look at a registry of these files in every way."""
        backend = _store(files)
        for name, call in _CALLS.items():
            self._call(f"{case}: {name}", call)
        for arguments in _COMMANDS:
            for more in ((), ("--json",)):
                self._command(case, (*arguments, *more))
        assert contents_of(backend) == files, f"{case}: something was written"

    def _call(self, name: str, call: Callable[[Registry], object]) -> None:
        try:
            with registry.open(URL) as opened:
                call(opened)
        except RegistryError as error:
            self.refused += 1
            self._check_text(name, str(error))
            if error.exit_code not in _STATUSES:
                self.faults.append(f"{name}: {type(error).__name__}: {error}")
        except BaseException as error:
            self.faults.append(f"{name}: {type(error).__name__}: {error}")
        else:
            self.answered += 1

    def _command(self, case: str, arguments: tuple[str, ...]) -> None:
        name = f"{case}: holdfast {' '.join(arguments)}"
        result = CliRunner().invoke(_APP, arguments, env={"HOLDFAST_REGISTRY": URL})
        self._check_text(name, result.output)
        if result.exit_code not in _STATUSES or (
            result.exception not in (None,) and not isinstance(result.exception, SystemExit)
        ):
            self.faults.append(
                f"{name}: status {result.exit_code}: {result.output[-300:]!r} {result.exception!r}"
            )
        elif result.exit_code:
            self.refused += 1
        else:
            self.answered += 1
        if (arguments[0] in ("ls", "du") and len(arguments) < 3) or arguments[:2] == ("run", "ls"):
            if CALM not in result.output and result.exit_code != 8:
                self.faults.append(f"{name}: hides the other run: {result.output[-300:]!r}")

    def _check_text(self, name: str, text: str) -> None:
        odd = [char for char in text if not char.isprintable() and char != "\n"]
        if odd:
            self.faults.append(f"{name}: raw {odd[:3]!r}")


def _store(files: dict[str, bytes]) -> MemoryBackend:
    backend = MemoryBackend(_NAME)
    for key in contents_of(backend):
        backend.delete(key)
    for key, data in files.items():
        backend.put(key, data)
    return backend


def contents_of(backend: MemoryBackend) -> dict[str, bytes]:
    """Return every object of a store."""
    return {info.key: backend.get(info.key) for info in backend.list()}


@contextmanager
def quietly() -> Iterator[None]:
    """Look without threads and without warnings: thousands of times."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr("registry.store.Pools", lambda _: InlinePools())
        patch.setattr(logging.getLogger("holdfast"), "disabled", True)
        yield


# Calls of the library


def _each(opened: Registry, look: Callable[[Any], object]) -> None:
    """Look at each stored state; what one refuses must not hide the next."""
    run = opened.run(FORGED)
    states = [
        *(run.find(record.n) for record in run.manifest.checkpoints),
        *(opened.stored(f"{FORGED}/{ref}") for ref in ("artifacts/bank", "releases/latest")),
    ]
    last: RegistryError | None = None
    for state in states:
        try:
            look(state)
        except RegistryError as error:
            last = error
    if last is not None:
        raise last


def _told(checkpoint: Any) -> None:
    repr(checkpoint)
    for name in ("created", "metrics", "meta", "phase", "step", "ref", "size_bytes", "components"):
        getattr(checkpoint, name, None)
    checkpoint.tensors()
    list(checkpoint)


def _lazy(state: Any) -> None:
    for path in state:
        lazy = state[path]
        repr(lazy)
        lazy[...]
        if lazy.shape:
            lazy[:1]


def _restore(opened: Registry) -> None:
    restored = opened.run(FORGED).restore()
    assert restored is not None


def _calm(opened: Registry) -> None:
    assert opened.run(CALM).latest().load()["model"]["w"].shape == (30,)
    assert CALM in opened.runs()


def _whole(opened: Registry) -> None:
    run = opened.run(FORGED)
    repr(run)
    for name in ("status", "config", "spec", "phase"):
        getattr(run, name)
    list(run.history())
    run.checkpoints(), run.latest(), run.evicted(), run.best()
    run.manifest.holders()


def _streams(opened: Registry) -> None:
    stream = opened.run(FORGED).stream("rows")
    list(stream.read())
    list(stream.read(archive="first"))


def _pool(opened: Registry) -> None:
    pool = opened.run(FORGED).pool
    [(entry.promoted, entry.conservative, entry.win_rate, repr(entry)) for entry in pool.entries()]
    pool.draws(0, 3)
    pool.histories()
    pool.load(1)


_CALLS: dict[str, Callable[[Registry], object]] = {
    "calm": _calm,
    "run": _whole,
    "told": lambda opened: _each(opened, _told),
    "load": lambda opened: _each(opened, lambda state: state.load()),
    "load original": lambda opened: _each(opened, lambda state: state.load(precision="original")),
    "lazy": lambda opened: _each(opened, _lazy),
    "restore": _restore,
    "streams": _streams,
    "pool": _pool,
    "verify": lambda opened: opened.verify(deep=True),
    "usage": lambda opened: opened.usage(),
    "digest": lambda opened: opened.stored("0" * 12),
    "near": lambda opened: opened.run("nihgt"),
}
