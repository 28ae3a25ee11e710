"""An open registry: its runs, the stored states that refs name, and its maintenance.

`holdfast.registry.factory` creates and opens registries.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Self

from holdfast.backends.escape import quoted
from holdfast.registry import handles
from holdfast.registry.errors import Conflict, InvalidInput, NotFound
from holdfast.registry.history.epochs import DAY_S
from holdfast.registry.runs import rooms
from holdfast.registry.storage.codecs import Compression
from holdfast.registry.storage.connecting import Address, open_store
from holdfast.registry.storage.keys import check_run_id
from holdfast.registry.storage.store import Store
from holdfast.registry.values.suggest import near

if TYPE_CHECKING:
    from holdfast.registry.collective.group import Group
    from holdfast.registry.handles import Checkpoint, Run, RunLog, RunSpec
    from holdfast.registry.history.actions import CreateRun
    from holdfast.registry.journal.settings import Journal
    from holdfast.registry.loading.stored import Stored
    from holdfast.registry.runs.rooms import (
        Branches,
        GcReport,
        Progress,
        RepackReport,
        RepairReport,
        Usage,
        VerifyReport,
    )
    from holdfast.registry.spec import Retention
    from holdfast.registry.spec.monitors import Monitor

_LOGGER = logging.getLogger("holdfast")


class Registry:
    """An open registry. Close it, or use it as a context manager, to finish running saves."""

    def __init__(self, store: Store, journal: Journal | None = None) -> None:
        self._store = store
        self._journal = journal
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
        rooms.inherit(handles.committer_of(run), inherited)
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
            Conflict: It was begun with other monitors, another preset, seed or input hash. Another
                configuration is only warned of, unless the preset's `must_match` demands it.
            IntegrityError: Its log is damaged.
        """
        name = os.environ.get("HOLDFAST_RUN") if run_id is None else run_id
        if name is None:
            raise InvalidInput("no run is named", hint="Pass its id, or set HOLDFAST_RUN.")
        if group is not None and self._journal is not None:
            raise InvalidInput(
                "ranks that save together do not use a journal",
                where="group",
                hint="Open the registry with journal=''.",
            )
        log = self._open_log(name, must_exist=not create)
        options = handles.RunOptions(preset, config, seed, monitor, retention, input_hash)
        if log.run.commits == 0 and not handles.begin(log, handles.creation(options)):
            log.refresh()
        if create:
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
        if not path and handles.is_digest(name) and name.removeprefix("sha256:") not in self.runs():
            return handles.find_by_id(self.url, self.runs(), self._peek, name)
        return handles.find_in_run(self._peek(name, by_id=handles.is_digest(path)), path)

    def verify(
        self,
        *,
        deep: bool = False,
        sample: float | None = None,
        resume: str | os.PathLike[str] | None = None,
        decode: bool = False,
        heads: str | os.PathLike[str] | None = None,
        write_heads: str | os.PathLike[str] | None = None,
        progress: Progress | None = None,
    ) -> VerifyReport:
        """Check the registry: its structure, and with `deep` every byte of it; it may be in use.

        Args:
            deep: Read and hash every byte, instead of comparing names and sizes only.
            sample: Read and hash this share of the packs' bytes, above 0 and at most 1; each call
                chooses another one at random.
            resume: A local file that records the packs that were read, so that an interrupted
                verification can continue; with `sample` each call reads another share until
                everything was read. Implies `deep` if `sample` is not given.
            decode: Also decode every compressed chunk and hash the result: proves that the writer
                encoded the right bytes. Takes about as long as loading each checkpoint.
                Implies `deep` if `sample` is not given.
            heads: A local file that `write_heads` wrote, for this registry or its original: a log
                that is shorter than there, different or gone is an error.
            write_heads: A local file for the heads of all runs; written if no error was found.
            progress: Called with the number of bytes checked so far.

        Returns:
            A report with `.ok` and `.findings`.

        Raises:
            InvalidInput: `sample` is no share, `resume` is a file of another kind or registry, or
                a file of heads cannot be read or written.
            StorageError: The store did not answer; with `resume` the next call continues there.
        """
        report = rooms.verify(
            self._store,
            deep=deep,
            sample=sample,
            resume=resume,
            decode=decode,
            heads=heads,
            write_heads=write_heads,
            progress=progress,
        )
        rooms.note_verify(self._store, report)
        return report

    def repair(
        self,
        mirror: str | os.PathLike[str] | Registry,
        *,
        deep: bool = True,
        dry_run: bool = False,
        progress: Progress | None = None,
    ) -> RepairReport:
        """Restore missing and damaged objects from a mirror, while others write and collect.

        Every byte is verified before it is written. Logs, epochs and `registry.json` are not
        rebuilt: only a backup of this registry has them.

        Args:
            mirror: A registry that holds the same states, or its URL.
            deep: Read and hash everything to find damage, instead of names and sizes only.
            dry_run: Only report; write nothing.
            progress: Called with the number of bytes checked so far.

        Returns:
            A report with `.ok`, `.mended` and `.left`.

        Raises:
            InvalidInput: The mirror is this very registry.
            NotFound: There is no registry at its URL.
            UnsupportedFormat: This registry demands a newer writer.
        """
        with ExitStack() as stack:
            if isinstance(mirror, Registry):
                source = mirror.store
            else:
                source = open_store(Address(mirror), read_only=True)
                stack.callback(source.close)
            return rooms.repair(self._store, source, deep=deep, dry_run=dry_run, progress=progress)

    def gc(
        self,
        *,
        grace_s: float = DAY_S,
        dry_run: bool = False,
        progress: Progress | None = None,
    ) -> GcReport:
        """Delete objects that no run needs, while others write (`docs/collection.md`).

        It is safe beside any number of writers and other collections, for any clocks. The next
        collection finishes a killed one.

        Args:
            grace_s: Seconds, by the store's clock, for which objects stay after they were stored or
                evicted.
            dry_run: Only report what would be deleted; the age of objects is then computed by this
                machine's clock.
            progress: Called with the number of bytes deleted so far.

        Raises:
            IntegrityError: Something is unreadable or unknown; nothing was deleted.
            UnsupportedFormat: A newer Holdfast wrote something; nothing was deleted.
            StoreUnsuitable: A symbolic link is in the registry; nothing was deleted.
        """
        return rooms.collect(self._store, grace_s=grace_s, dry_run=dry_run, progress=progress)

    def repack(
        self,
        runs: Iterable[str] | None = None,
        *,
        min_dead: float = 0.25,
        compression: Compression | None = None,
        keyframe_every: int | None = None,
        dry_run: bool = False,
        progress: Progress | None = None,
    ) -> RepackReport:
        """Rewrite packs that are unneeded in part, and join small ones.

        Others may read, save, sync, collect and repack meanwhile. No id changes. The old packs stay
        until they are collected. Deltas whose bases nothing else needs are stored again if that
        takes fewer bytes. The next repack uses the work of an interrupted one. If two repacks place
        one state differently, the first wins, and the report of the other one shows it.

        Args:
            runs: Only packs that these runs need; other runs that share one are changed with them.
            min_dead: Rewrite a pack if at least this share of its chunk bytes, above 0 and up to 1,
                is unneeded.
            compression: `zstd` or `lz4`: compress raw chunks, if that saves enough; `none`: store
                everything raw, deltas too. Default: change no compression.
            keyframe_every: Cut chains of deltas, so that reading a chunk takes at most this many
                versions of it, 1 to 32. Default: cut none.
            dry_run: Only plan. To compress or cut, it reads and encodes the chunks.
            progress: Called with the number of bytes written so far.

        Raises:
            InvalidInput: `min_dead`, `compression` or `keyframe_every` is out of range.
            NotFound: There is no such run.
            IntegrityError: Something is damaged or gone; the chunks moved by then are sound, and
                nothing is deleted.
            Conflict: Collections interrupted it too often.
        """
        return rooms.repack(
            self._store,
            runs,
            min_dead=min_dead,
            compression=compression,
            keyframe_every=keyframe_every,
            dry_run=dry_run,
            progress=progress,
        )

    def usage(self) -> Usage:
        """Count the bytes on the store, by run and checkpoint.

        Raises:
            IntegrityError: Something is damaged or gone.
        """
        return rooms.measure(self._store)

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
