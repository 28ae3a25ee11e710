"""An open registry: its runs, and the stored states that refs name.

`factory` creates and opens registries; `Registry` inherits its maintenance from `upkeep`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from holdfast.backends.escape import quoted
from holdfast.registry.errors import Conflict, InvalidInput, NotFound
from holdfast.registry.face import handles, rooms
from holdfast.registry.face.upkeep import MaintainedRegistry
from holdfast.registry.objects import check_run_id
from holdfast.registry.store import Store
from holdfast.registry.values import markup, near

if TYPE_CHECKING:
    from holdfast.registry.face.handles import (
        Checkpoint,
        Progress,
        Run,
        RunLog,
        RunSpec,
        Transfers,
    )
    from holdfast.registry.face.rooms import Branches, Diff
    from holdfast.registry.history.actions import CreateRun
    from holdfast.registry.loading import Stored
    from holdfast.registry.saving.collective import Group
    from holdfast.registry.saving.journal import Journal
    from holdfast.registry.spec import Monitor, Retention

_LOGGER = logging.getLogger("holdfast")


class Registry(MaintainedRegistry):
    """An open registry. Close it, or use it as a context manager, to finish running saves."""

    def __init__(self, store: Store, journal: Journal | None = None) -> None:
        super().__init__(store)
        self._journal = journal
        self._opened: list[Run] = []
        self._transfers: Transfers | None = None

    def __repr__(self) -> str:
        return f"<Registry {self.url}>"

    def _repr_html_(self) -> str:
        return markup.safely("Registry", self._html)

    def _html(self) -> str:
        """Return it as HTML; this asks for the names of the runs, one listing."""
        facts = {"id": self.id}
        try:
            names = handles.list_runs(self._store)
        except Exception as error:  # shown in the place of the runs
            return markup.describe("Registry", self.url, facts, error)
        rows = ((name,) for name in reversed(names))
        runs = markup.Rows(("run",), rows, len(names), "runs: reg.runs_table() has all")
        return markup.describe("Registry", self.url, {**facts, "runs": len(names)}, runs)

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

    def create_run(
        self,
        run_id: str | None = None,
        *,
        preset: str | os.PathLike[str] | RunSpec | None = None,
        config: object = None,
        seed: int | None = None,
        monitor: Monitor | Iterable[Monitor] = (),
        retention: Retention | None = None,
        input_hash: str | None = None,
    ) -> Run:
        """Begin a run. Without a preset or a retention policy every checkpoint is kept.

        Args:
            run_id: Its name. Default: `YYYYMMDD_HHmmss_<seed hex8>`.
            preset: The rules of the run: `default`, `hydra`, `adr004`, `andrea`, `cobre`, or the
                path of a TOML file (`docs/presets.md`).
            config: The training configuration, plain values only. It is stored for ever, and
                everybody who can read the registry can read it: no secrets.
            seed: The master seed, from 0 to 2^64 - 1. Default: random.
            monitor: Decides which checkpoint is `best`; one or several.
            retention: Which checkpoints are kept. Default: the preset's policy, or all.
            input_hash: Any text that identifies the input data.

        Raises:
            Conflict: A run of that name exists.
            InvalidInput: An argument is wrong: the name, a preset that is not valid, or a
                configuration that cannot be stored.
            NotFound: There is no such preset.
        """
        options = handles.RunOptions(preset, config, seed, monitor, retention, input_hash)
        return self._create(run_id, handles.creation(options))

    def fork(
        self,
        source: Checkpoint | str,
        run_id: str | None = None,
        *,
        preset: str | os.PathLike[str] | RunSpec | None = None,
        config: object = None,
        seed: int | None = None,
        monitor: Monitor | Iterable[Monitor] = (),
        retention: Retention | None = None,
        input_hash: str | None = None,
    ) -> Run:
        """Begin a run that continues from a checkpoint of another one. No data is copied.

        It inherits the checkpoint with its companions, the gates and artifacts, the streams up to
        it, and the pool with its ratings; releases and tags stay with the parent.

        Args:
            source: The checkpoint, or its ref.
            run_id: As for `create_run`.
            preset: As for `create_run`. If none of `preset`, `monitor` and `retention` is given,
                the parent's rules apply.
            config: As for `create_run`. Default: the parent's.
            seed: As for `create_run`. Default: the parent's.
            monitor: As for `create_run`.
            retention: As for `create_run`.
            input_hash: As for `create_run`. Default: the parent's.

        Raises:
            Conflict: A run of that name exists, or the checkpoint was evicted.
            NotFound: The checkpoint is not in this registry.
        """
        if isinstance(source, str):  # it names a state as of now, saves under way included
            for one in self._opened:
                if one.id == source.partition("/")[0]:
                    one.wait(remote=True)
        checkpoint = self.checkpoint(source) if isinstance(source, str) else source
        inherited = rooms.inheritance(self._store, checkpoint)
        parent = self._peek(checkpoint.run_id).manifest
        options = handles.RunOptions(preset, config, seed, monitor, retention, input_hash)
        run = self._create(run_id, handles.forked(parent, inherited.parent, options))
        rooms.inherit(run.handle.committer, inherited)
        return run

    def run(
        self,
        run_id: str | None = None,
        *,
        create: bool = False,
        preset: str | os.PathLike[str] | RunSpec | None = None,
        config: object = None,
        seed: int | None = None,
        monitor: Monitor | Iterable[Monitor] = (),
        retention: Retention | None = None,
        input_hash: str | None = None,
        group: Group | None = None,
    ) -> Run:
        """Open a run, to continue it or to read it.

        Args:
            run_id: Its name. Default: the environment variable `HOLDFAST_RUN`.
            create: Create the run if it does not exist: the same line of a job script then starts
                it and, after a requeue, continues it. The arguments below create it, and are
                compared with those of a run that exists.
            preset: As for `create_run`, like all below.
            config: The training configuration.
            seed: The master seed.
            monitor: Decides which checkpoint is `best`.
            retention: Which checkpoints are kept.
            input_hash: Any text that identifies the input data.
            group: The ranks of a job that save together, such as `holdfast.distributed.TorchGroup`:
                every rank opens the run and calls `save`. Default: this process saves alone.

        Raises:
            InvalidInput: A group was given, and the registry has a journal.
            NotFound: There is no such run; near names are suggested.
            Conflict: It was begun with other monitors, another preset, seed or input hash; or it
                was dropped, and `create` is given. Another configuration is only warned of, unless
                the preset's `must_match` demands it.
            IntegrityError: Its log is damaged.
        """
        name = os.environ.get("HOLDFAST_RUN") if run_id is None else run_id
        if name is None:
            raise InvalidInput("no run is named", hint="Pass its id, or set HOLDFAST_RUN.")
        if group is not None and self._journal is not None:
            raise InvalidInput(
                "ranks that save together do not use a journal",
                where="group",
                hint="Carry what is only in it (`holdfast journal carry`), or the ranks continue "
                "from an older checkpoint; then open the registry with journal=''.",
            )
        log = self._open_log(name, must_exist=not create)
        options = handles.RunOptions(preset, config, seed, monitor, retention, input_hash)
        if log.run.commits == 0 and not handles.begin(log, handles.creation(options)):
            log.refresh()
        if create:
            handles.check_not_dropped(log.run)
            log.make_durable()  # the caller may rely on the run
        handles.check_same(log.run, options)
        run = handles.Run(self._store, log, options.compared, self._journal, group)
        return self._hold(run)

    def _create(self, run_id: str | None, action: CreateRun) -> Run:
        for name in [run_id] if run_id is not None else handles.default_ids(int(action.seed, 16)):
            log = handles.RunLog(self._store, check_run_id(name))
            if self._store.heads is not None and self._store.heads.seen(name) is not None:
                log.open()  # it exists, or did: `open` refuses a run that is gone
            if handles.begin(log, action):
                if log.run.spec == handles.RunSpec(monitors=action.monitors):
                    _LOGGER.info("%s: no preset: every checkpoint is kept", name)
                return self._hold(handles.Run(self._store, log, journal=self._journal))
        raise Conflict(
            "a run of this name exists",
            where=run_id,
            hint="Continue it with reg.run(id), or choose another name.",
        )

    def runs(self) -> list[str]:
        """Return the names of all runs, sorted."""
        # Before the listing: a run that begins meanwhile would be seen, and not listed.
        seen = self._store.heads.all() if self._store.heads is not None else {}
        runs = handles.list_runs(self._store)
        for gone in sorted(seen.keys() - set(runs)):
            _LOGGER.warning("%s: the run %s was here and is gone", self.url, gone)
        return runs

    def runs_table(self) -> Any:
        """Return a row for each run as a `pyarrow.Table`, sorted by name.

        docs/notebooks.md lists the columns. A run that cannot be read has the status `damaged` and
        its error. This opens each run, several at once: four to eleven requests for most.

        Raises:
            InvalidInput: pyarrow is not installed.
            StoreUnavailable: The store does not answer.
        """
        return rooms.run_table(
            self._store, self.runs(), lambda name: handles.RunLog(self._store, name).open()
        )

    def compare(self, first: str, second: str) -> Branches:
        """Compare two runs side by side: a fork and its parent, two forks, or any two.

        Their settings, configurations and metrics by step, the checkpoint that both continue from,
        and the first step at which their states differ, tensor by tensor. Reads no tensors.

        Args:
            first: Name of a run.
            second: Name of another one.

        Raises:
            NotFound: There is no such run; near names are suggested.
            IntegrityError: A log or a manifest is damaged or gone.
        """
        one, two = (self._open_log(name, must_exist=True) for name in (first, second))
        return rooms.compare_runs(self._store, one, two)

    def diff(
        self, before: Checkpoint | str, after: Checkpoint | str, *, values: bool = False
    ) -> Diff:
        """Compare two checkpoints, tensor by tensor and value by value.

        Args:
            before: The first checkpoint, or its ref.
            after: The second one.
            values: Whether to read changed tensors and return the distances of their elements;
                without it only manifests are read.

        Raises:
            NotFound: A ref names nothing.
            IntegrityError: A manifest, or a chunk that is read, is damaged or gone.
        """
        old, new = (
            self.checkpoint(one) if isinstance(one, str) else one for one in (before, after)
        )
        return rooms.diff(old.handle, new.handle, values=values)

    def checkpoint(self, ref: str) -> Checkpoint:
        """Return exactly the checkpoint that a ref names.

        Args:
            ref: `RUN`, `RUN/latest`, `RUN/phase2/best`, `RUN/gates/NAME`, `RUN/tags/NAME`,
                `RUN/<hex digits>`, or 8 and more hex digits of an id alone.

        Raises:
            NotFound: It names nothing.
            AmbiguousRef: It names several.
            InvalidInput: It names a state that is no checkpoint: `stored` returns that.
        """
        found = self.stored(ref)
        if not isinstance(found, handles.Checkpoint):
            raise InvalidInput(
                "this is a stored state and no checkpoint",
                where=found.ref,
                hint="reg.stored(ref) returns it, with `load` and `load_into`.",
            )
        return found

    def stored(self, ref: str) -> Stored:
        """Return exactly the stored state that a ref names.

        Args:
            ref: Of a checkpoint, or `RUN/releases/1.2.0`, `RUN/releases/latest`,
                `RUN/artifacts/NAME`, `RUN/pool/v0042`, `RUN/phase2/step00045000/companions/NAME`.

        Raises:
            NotFound: It names nothing.
            AmbiguousRef: It names several.
            IntegrityError: A run is damaged: the one that is named or, where an id alone is in none
                of the others, any.
        """
        if not isinstance(ref, str):
            raise InvalidInput(
                "not a ref", expected="a text such as 'RUN/latest'", found=quoted(ref)
            )
        name, _, path = ref.partition("/")
        if not path and handles.is_digest(name):
            runs, threads = self.runs(), self._store.pools.bulk
            if name.removeprefix("sha256:") not in runs:
                return handles.find_by_id(self.url, runs, self._peek, name, threads)
        return handles.find_in_run(self._peek(name, by_id=handles.is_digest(path)), path)

    @contextmanager
    def progress(
        self, label: str = "", *, total: int | None = None, report: Progress | None = None
    ) -> Iterator[None]:
        """Show a bar of the bytes to and from the store while the block runs.

        In a notebook the bar is an output of the cell, elsewhere a line on stderr if that is a
        terminal. It counts what this handle moves, in any thread: loads, saves, files that are
        written, verification. Chunks that a cache or an earlier save has are not moved.

        Args:
            label: What is done.
            total: The expected number of bytes, such as `checkpoint.size_bytes`.
            report: Called with the bytes so far, by any thread, in the place of the bar.
        """
        if self._transfers is None:
            self._transfers = handles.Transfers(self._store)
        shown = nullcontext(report) if report is not None else handles.bar(label, total)
        with shown as tell, self._transfers.observed(tell):
            yield

    def close(self) -> None:
        """Finish saves under way, stop the threads, close the connections."""
        runs, self._opened = self._opened, []
        with ExitStack() as stack:  # the store last, even if a run's last save failed
            stack.callback(self._store.close)
            for run in runs:
                stack.callback(run.close)

    def _open_log(self, name: str, *, must_exist: bool, by_id: bool = False) -> RunLog:
        log = handles.RunLog(self._store, check_run_id(name))
        log.open(check_head=not by_id)  # an id names the same bytes, however old the log is
        if must_exist and log.run.commits == 0:
            raise NotFound(
                "no such run",
                where=f"{self.url}: {name}",
                hint=near(name, handles.list_runs(self._store)),
            )
        return log

    def _peek(self, name: str, *, by_id: bool = False) -> Run:
        """Open a run for a look-up; `close` does not close it."""
        return handles.Run(self._store, self._open_log(name, must_exist=True, by_id=by_id))

    def _hold(self, run: Run) -> Run:
        self._opened.append(run)
        return run
