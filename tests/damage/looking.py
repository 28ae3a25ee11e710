"""Everything that looks at a registry, called one after another; whatever it says must be typed."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

import holdfast
from holdfast.backends.memory import MemoryBackend
from holdfast.dcp import HoldfastReader, typed_errors
from holdfast.registry.errors import RegistryError
from holdfast.registry.face.registry import Registry
from tests.damage.forging import CALM, FORGED, FORK
from tests.support.commands import invoke
from tests.support.inline import InlinePools

_NAME = "forged"
URL = f"memory://{_NAME}"
#: Made once: it takes as long as most of the commands.
#: What a question may end with: an answer, a name that is none any more, damage, a format.
_STATUSES = {0, 4, 6, 8}
#: What the specification of a run may forbid, so a forged one as well.
_BY_SPECIFICATION = ("pool", "run")
#: Those that report on every run, and must report on the sound one.
_LISTINGS = (("run", "ls"), ("ls",), ("du",))
_COMMANDS = (
    *_LISTINGS,
    *(("verify", "--deep"), ("gc", "--dry-run"), ("repack", "--dry-run")),
    *(("run", "show", FORGED), ("ls", FORGED, "--evicted"), ("log", FORGED)),
    *(("log", FORK, "--graph"), ("show", FORGED), ("show", FORGED, "--tensors")),
    *(("show", f"{FORGED}/releases/latest"), ("show", f"{FORGED}/artifacts/bank")),
    *(("show", f"{FORGED}/pool/v0001"), ("diff", f"{FORGED}/gates/good", FORGED)),
    *(("show", "--stats", FORGED), ("prune", FORGED, "--dry-run", "--last", "1")),
    *(("ls", f"{FORGED}/pool", "--evicted"), ("pool", "sample", FORGED), ("ls", f"{FORGED}/gates")),
    *(("ls", f"{FORGED}/releases"), ("show", f"{FORGED}/releases/1.0.0")),
    *(
        ("ls", f"{FORGED}/artifacts"),
        ("ls", f"{FORGED}/streams"),
        ("stream", "read", FORGED, "rows"),
    ),
)


@dataclass
class Looks:
    """Looks at forged registries.

    Attributes:
        is_brief: Whether all commands but listings print text, JSON or nothing by turns.
        faults: What was said otherwise than it should be: a call, and what came of it.
        refused: Calls that ended with a typed error.
        answered: Calls that gave an answer.
    """

    is_brief: bool = False
    faults: list[str] = field(default_factory=list)
    refused: int = 0
    answered: int = 0
    _turns: int = 0

    def at(self, files: dict[str, bytes], case: str) -> None:
        """Look at a registry of these files in every way."""
        backend = store(files)
        for name, call in _CALLS.items():
            self._call(f"{case}: {name}", call, may_forbid=name in _BY_SPECIFICATION)
        self._turns += 1
        for number, arguments in enumerate(_COMMANDS):
            both: tuple[tuple[str, ...], ...] = ((), ("--json",))
            if self.is_brief and arguments not in _LISTINGS:
                both = both[(number + self._turns) % 4 :][:1]
            for more in both:
                self._command(case, (*arguments, *more))
        if _contents(backend) != files:
            self.faults.append(f"{case}: something was written")

    def _call(self, name: str, call: Callable[[Registry], object], *, may_forbid: bool) -> None:
        try:
            with holdfast.open(URL) as opened:
                call(opened)
        except RegistryError as error:
            self.refused += 1
            self._check_text(name, str(error))
            if error.exit_code not in _STATUSES and not (may_forbid and error.exit_code == 3):
                self.faults.append(f"{name}: {type(error).__name__}: {error}")
        except Exception as error:
            self.faults.append(f"{name}: {type(error).__name__}: {error}")
        else:
            self.answered += 1

    def _command(self, case: str, arguments: tuple[str, ...]) -> None:
        name = f"{case}: holdfast {' '.join(arguments)}"
        result = invoke(*arguments, env={"HOLDFAST_REGISTRY": URL})
        self._check_text(name, result.output)
        may_forbid = arguments[0] in _BY_SPECIFICATION and result.exit_code == 3
        if result.exit_code in _STATUSES or may_forbid:
            self.refused += result.exit_code != 0
            self.answered += result.exit_code == 0
        else:
            self.faults.append(f"{name}: status {result.exit_code}: {result.output[-300:]}")
        # The damage is in the registry's own files: nothing can be read without them.
        is_all = "registry.json" in result.output or "error: epochs/" in result.output
        is_listing = tuple(one for one in arguments if one != "--json") in _LISTINGS
        if is_listing and not is_all and CALM not in result.output:
            self.faults.append(f"{name}: hides the other run: {result.output[-300:]}")

    def _check_text(self, name: str, text: str) -> None:
        odd = {char for char in text if not char.isprintable() and char != "\n"}
        if odd:
            self.faults.append(f"{name}: raw {sorted(odd)!r}")


def store(files: dict[str, bytes]) -> MemoryBackend:
    """Put files where `URL` finds them, and nothing else."""
    backend = MemoryBackend(_NAME)
    for key in _contents(backend):
        backend.delete(key)
    for key, data in files.items():
        backend.put(key, data)
    return backend


def _contents(backend: MemoryBackend) -> dict[str, bytes]:
    return {info.key: backend.get(info.key) for info in backend.list()}


@contextmanager
def quietly() -> Iterator[None]:
    """Look without threads, warnings and lines in the log: hundreds of times."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr("holdfast.registry.store.store.Pools", lambda _: InlinePools())
        patch.setattr(logging.getLogger("holdfast"), "disabled", True)
        yield


# Calls of the library


def _each(opened: Registry, look: Callable[[Any], object]) -> None:
    """Look at each stored state; what one refuses must not hide the next."""
    run = opened.run(FORGED)
    finds: list[Callable[[], Any]] = [
        lambda n=record.n: run.history.checkpoint(n)  # type: ignore[misc]
        for record in run.manifest.checkpoints
    ]
    finds += [
        lambda ref=ref: opened.stored(f"{FORGED}/{ref}")  # type: ignore[misc]
        for ref in ("artifacts/bank", "releases/latest", "pool/v0001")
    ]
    last: RegistryError | None = None
    for find in finds:
        try:
            look(find())
        except RegistryError as error:
            last = error
    if last is not None:
        raise last


def _told(state: Any) -> None:
    repr(state)
    for name in ("created", "metrics", "meta", "phase", "step", "ref", "size_bytes", "components"):
        getattr(state, name, None)
    state.tensors()
    list(state)


def _lazy(state: Any) -> None:
    for path in state:
        lazy = state[path]
        repr(lazy)
        lazy[...]
        if lazy.shape:
            lazy[:1]


def _restore(opened: Registry) -> None:
    assert opened.run(FORGED).restore() is not None


def _calm(opened: Registry) -> None:
    checkpoint = opened.run(CALM).latest()
    assert checkpoint is not None
    assert checkpoint.load()["model"]["w"].shape == (30,)
    assert CALM in opened.run_names()
    assert opened.checkpoint(checkpoint.digest.hex()).run_id == CALM


def _run(opened: Registry) -> None:
    run = opened.run(FORGED)
    for name in ("status", "config", "phases", "id", "pool", "releases"):
        repr(getattr(run, name))
    list(run.history.commits())
    run.manifest.holders()
    assert run.checkpoints() is not None
    assert run.retention.evicted() is not None
    run.latest()
    run.best()


def _streams(opened: Registry) -> None:
    stream = opened.run(FORGED).streams["rows"]
    stream.read()
    stream.read(archive="first")


def _pool(opened: Registry) -> None:
    pool = opened.run(FORGED).pool
    for entry in pool.entries():
        repr((entry.promoted, entry.conservative, entry.win_rate, entry))
    pool.draws(0, 3)
    pool.histories()
    pool.load(1)


def _by_dcp(state: Any) -> None:
    """Load all tensors and values as torch.distributed.checkpoint does, in one process."""
    reader = HoldfastReader(state)
    target = {
        key: torch.zeros(one.size, dtype=one.properties.dtype) if hasattr(one, "size") else None
        for key, one in reader.read_metadata().state_dict_metadata.items()
        if 2**53 not in getattr(one, "size", ())  # torch makes no such target
    }
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    with typed_errors():
        dcp.load(target, storage_reader=reader, planner=planner, no_dist=True)


_CALLS: dict[str, Callable[[Registry], object]] = {
    "calm": _calm,
    "run": _run,
    "told": lambda opened: _each(opened, _told),
    "load": lambda opened: _each(opened, lambda state: state.load()),
    "load original": lambda opened: _each(opened, lambda state: state.load(precision="original")),
    "lazy": lambda opened: _each(opened, _lazy),
    "dcp": lambda opened: _each(opened, _by_dcp),
    "restore": _restore,
    "streams": _streams,
    "pool": _pool,
    "verify": lambda opened: opened.verify(deep=True),
    "usage": lambda opened: opened.usage(),
    "digest": lambda opened: opened.stored("0" * 12),
    "near": lambda opened: opened.run("nihgt"),
}
