"""A registry as its users hold it: making one, opening one, and the runs in it."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from types import TracebackType
from typing import Self

from backends import Backend, open_backend
from backends.probe import probe_put_if_absent
from backends.wrappers import ReadOnly
from registry.actions import CreateRun, Line, Monitor
from registry.checkpoint import Checkpoint
from registry.environment import describe_environment
from registry.errors import AmbiguousRef, Conflict, InvalidInput, NotFound
from registry.keys import check_run_id
from registry.log import RunLog, commit_line, list_runs
from registry.plain import encode_plain, plain_digest
from registry.refs import find_in_run, is_digest
from registry.run import Run
from registry.state import RunManifest
from registry.store import Store, create_config, read_config
from registry.suggest import near
from registry.verify import Progress, VerifyReport, verify

_LOGGER = logging.getLogger("holdfast")
_COLLISIONS = 100


def init(url: str | os.PathLike[str], *, skip_race_probe: bool = False) -> Registry:
    """Make a registry in a folder, a bucket or a prefix, and open it.

    Args:
        url: Where; `docs/cli.md` lists the forms.
        skip_race_probe: Do not race the store's put-if-absent first. For emulators that are known
            not to be atomic and hold nothing dear; `registry.json` records it.

    Raises:
        Conflict: There is a registry already.
        StoreUnsuitable: The store lets two writers win, or lacks what a registry needs.
    """
    backend = open_backend(os.fspath(url))
    try:
        if not skip_race_probe:
            probe_put_if_absent(backend, prefix=f".probe/{secrets.token_hex(8)}")
        config = create_config(backend, "skipped" if skip_race_probe else "passed")
    except BaseException:
        backend.close()
        raise
    return Registry(Store(backend, config))


def open(  # noqa: A001 - registry.open is the word that users expect
    url: str | os.PathLike[str] | None = None,
    *,
    read_only: bool = False,
    expect_id: str | None = None,
) -> Registry:
    """Open a registry.

    Args:
        url: Where it is; the environment variable `HOLDFAST_REGISTRY` without one.
        read_only: Refuse every write in this process, whatever the credentials allow.
        expect_id: The registry's id as it was remembered; another one is refused.

    Raises:
        NotFound: There is none.
        Conflict: It is another registry than expected.
        UnsupportedFormat: It was made by a newer Holdfast.
    """
    place = os.environ.get("HOLDFAST_REGISTRY") if url is None else os.fspath(url)
    if place is None:
        raise InvalidInput(
            "no registry is named", hint="Pass its URL or path, or set HOLDFAST_REGISTRY."
        )
    backend: Backend = open_backend(place)
    if read_only:
        backend = ReadOnly(backend)
    try:
        return open_on(backend, expect_id=expect_id)
    except BaseException:
        backend.close()
        raise


def open_on(backend: Backend, *, expect_id: str | None = None) -> Registry:
    """Open the registry behind a backend that was made by hand."""
    config = read_config(backend)
    if expect_id is not None and config.id != expect_id:
        raise Conflict(
            "another registry lies here than the one that was expected",
            where=backend.url,
            expected=expect_id,
            found=config.id,
            hint="Check the URL; if the registry was replaced on purpose, forget the old id.",
        )
    return Registry(Store(backend, config))


class Registry:
    """An open registry. Close it, or use it as a context manager, to finish what is under way."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._opened: list[Run] = []

    def __repr__(self) -> str:
        return f"<Registry {self.url}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def url(self) -> str:
        """Where it is, without secrets."""
        return self._store.backend.url

    @property
    def id(self) -> str:
        """The registry's own id; the same wherever it is mounted."""
        return self._store.config.id

    @property
    def store(self) -> Store:
        """The objects behind it, for maintenance."""
        return self._store

    def create_run(
        self,
        run_id: str | None = None,
        *,
        config: object = None,
        seed: int | None = None,
        monitor: Monitor | Iterable[Monitor] = (),
        input_hash: str | None = None,
    ) -> Run:
        """Begin a run. Without a preset every checkpoint is kept.

        Args:
            run_id: Its name; `YYYYMMDD_HHmmss_<seed hex8>` without one.
            config: The training configuration, plain values only.
            seed: The master seed; random without one.
            monitor: What decides `best`, one or several.
            input_hash: Identity of the input data, where the caller has one.

        Raises:
            Conflict: A run of that name exists.
            InvalidInput: The name is not legal, or the configuration holds what cannot be stored.
        """
        seed = secrets.randbits(64) if seed is None else seed
        action = _creation(config, seed, monitor, input_hash)
        for name in [run_id] if run_id is not None else _default_ids(seed):
            log = RunLog(self._store, check_run_id(name))
            if _begin(log, action):
                _LOGGER.info("%s: no preset: every checkpoint is kept", name)
                return self._hold(Run(self._store, log))
        raise Conflict(
            "a run of this name exists",
            where=run_id,
            hint="Continue it with reg.run(id), or choose another name.",
        )

    def run(
        self,
        run_id: str | None = None,
        *,
        create: bool = False,
        config: object = None,
        seed: int | None = None,
        monitor: Monitor | Iterable[Monitor] = (),
        input_hash: str | None = None,
    ) -> Run:
        """Open a run, to continue it or to read it.

        Args:
            run_id: Its name; the environment variable `HOLDFAST_RUN` without one.
            create: Begin it where it does not exist: the same line of a job script then starts and,
                after a requeue, continues.
            config: As for `create_run`; used only when the run is begun here.
            seed: Likewise.
            monitor: Likewise.
            input_hash: Likewise.

        Raises:
            NotFound: There is no such run; near names are suggested.
            Conflict: It was begun with other monitors.
            IntegrityError: Its log is damaged.
        """
        name = os.environ.get("HOLDFAST_RUN") if run_id is None else run_id
        if name is None:
            raise InvalidInput("no run is named", hint="Pass its id, or set HOLDFAST_RUN.")
        log = self._open_log(name, must_exist=not create)
        if log.state.commits == 0:
            seed = secrets.randbits(64) if seed is None else seed
            if not _begin(log, _creation(config, seed, monitor, input_hash)):
                log.refresh()
        _check_monitors(log, _monitors(monitor))
        return self._hold(Run(self._store, log))

    def runs(self) -> list[str]:
        """Return the names of all runs, sorted."""
        return list_runs(self._store)

    def checkpoint(self, ref: str) -> Checkpoint:
        """Return exactly the checkpoint that a ref names.

        Args:
            ref: `RUN`, `RUN/latest`, `RUN/phase2/best`, `RUN/tags/NAME`, `RUN/<hex digits>`, or
                8 and more hex digits of an id alone.

        Raises:
            NotFound: It names nothing.
            AmbiguousRef: It names several.
        """
        name, _, path = ref.partition("/")
        if not path and is_digest(name) and name.removeprefix("sha256:") not in self.runs():
            return self._by_digest(name)
        return find_in_run(self._peek(name), path)

    def verify(self, *, deep: bool = False, progress: Progress | None = None) -> VerifyReport:
        """Check the registry: its structure, and with `deep` every byte of it.

        Args:
            deep: Read and hash everything, instead of names and sizes only.
            progress: Called with the number of bytes checked so far.

        Returns:
            A report with `.ok` and `.findings`.
        """
        return verify(self._store, deep=deep, progress=progress)

    def close(self) -> None:
        """Finish saves under way, stop the threads, close the connections."""
        runs, self._opened = self._opened, []
        with ExitStack() as stack:  # the store last, and whatever a run's last save says
            stack.callback(self._store.close)
            for run in runs:
                stack.callback(run.close)

    def _by_digest(self, digits: str) -> Checkpoint:
        found: dict[bytes, Checkpoint] = {}
        for name in self.runs():
            try:
                checkpoint = find_in_run(self._peek(name), digits)
            except AmbiguousRef:
                raise
            except NotFound:
                continue
            found[checkpoint.digest] = checkpoint
        if len(found) > 1:
            raise AmbiguousRef(
                "several checkpoints begin with these digits",
                where=digits,
                found=", ".join(f"{ck.run_id}/{ck.digest.short}" for ck in found.values()),
                hint="Give more digits, or the run: RUN/DIGITS.",
            )
        if not found:
            raise NotFound("no checkpoint with this id", where=f"{self.url}: {digits}")
        return next(iter(found.values()))

    def _open_log(self, name: str, *, must_exist: bool) -> RunLog:
        log = RunLog(self._store, check_run_id(name))
        log.open()
        if must_exist and log.state.commits == 0:
            raise NotFound(
                "no such run",
                where=f"{self.url}: {name}",
                hint=near(name, list_runs(self._store)),
            )
        return log

    def _peek(self, name: str) -> Run:
        """Open a run to look something up; unlike those that users hold it is not kept."""
        return Run(self._store, self._open_log(name, must_exist=True))

    def _hold(self, run: Run) -> Run:
        self._opened.append(run)
        return run


def _creation(
    config: object, seed: int, monitor: Monitor | Iterable[Monitor], input_hash: str | None
) -> CreateRun:
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**64:
        raise InvalidInput("not a seed", expected="a whole number below 2^64", found=repr(seed))
    monitors = _monitors(monitor)
    if not isinstance(input_hash, str | None):
        raise InvalidInput("an input hash is a string", found=type(input_hash).__name__)
    encoded = encode_plain(config, "config")
    return CreateRun(
        config=encoded,
        config_hash=plain_digest(encoded),
        input_hash=input_hash,
        seed=f"{seed:016x}",
        environment=describe_environment(),
        monitors=monitors,
    )


def _monitors(monitor: Monitor | Iterable[Monitor]) -> tuple[Monitor, ...]:
    monitors = (monitor,) if isinstance(monitor, Monitor) else tuple(monitor)
    if not all(isinstance(one, Monitor) for one in monitors):
        raise InvalidInput(
            "not a monitor",
            expected="Monitor(metric='loss', mode='min'), or several",
            found=repr(monitor),
        )
    return monitors


def _check_monitors(log: RunLog, given: tuple[Monitor, ...]) -> None:
    """Refuse other monitors than the run was begun with: its `best` would not be what was asked."""
    if given and given != log.state.monitors:
        raise Conflict(
            "the run was begun with other monitors",
            where=log.run_id,
            expected=", ".join(f"{m.metric}:{m.mode}" for m in log.state.monitors) or "none",
            found=", ".join(f"{m.metric}:{m.mode}" for m in given),
            hint="Ask with `run.best(monitor=...)`, or begin another run.",
        )


def _begin(log: RunLog, action: CreateRun) -> bool:
    """Put commit 0; return whether this call began the run."""
    begun = False

    def compose(state: RunManifest) -> Sequence[Line] | None:
        nonlocal begun
        begun = state.commits == 0
        return [commit_line(state, [action])] if begun else None

    log.append(compose)
    return begun


def _default_ids(seed: int) -> list[str]:
    base = f"{datetime.now(UTC):%Y%m%d_%H%M%S}_{seed & 0xFFFFFFFF:08x}"
    return [base, *(f"{base}_{number}" for number in range(2, _COLLISIONS))]
