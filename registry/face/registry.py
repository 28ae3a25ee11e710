"""An open registry: its runs, the stored states that refs name, and its maintenance.

`factory` creates and opens registries. As in `run`, a room that only some calls need is imported in
the method that calls it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack

from holdfast.backends.escape import quoted
from holdfast.registry.errors import Hint, IntegrityError, InvalidInput, RegistryError
from holdfast.registry.face.options import (
    GcOptions,
    NewRun,
    RepackOptions,
    VerifyOptions,
    shows_options,
)
from holdfast.registry.face.registry_handle import RegistryHandle
from holdfast.registry.store import DAY_S, Store

if TYPE_CHECKING:
    from holdfast.registry.comparing import Branches, Diff, Ranking
    from holdfast.registry.face.attesting import Attestation
    from holdfast.registry.face.metrics import Export
    from holdfast.registry.face.run import Run
    from holdfast.registry.history import RunLog
    from holdfast.registry.history.replay import RunManifest
    from holdfast.registry.loading import Checkpoint, Stored
    from holdfast.registry.plots import Axis
    from holdfast.registry.saving.collective import Group
    from holdfast.registry.saving.journal import Journal
    from holdfast.registry.spec import Monitor
    from holdfast.registry.store import Transfers
    from holdfast.registry.upkeep import (
        DropRules,
        FreezeReport,
        GcReport,
        Progress,
        SignedRun,
        TierReport,
        UpgradeReport,
        Usage,
        VerifyReport,
    )
    from holdfast.registry.upkeep.repacking import RepackReport
    from holdfast.registry.values import Digest


class Registry:
    """An open registry. Close it, or use it as a context manager, to finish running saves."""

    def __init__(self, store: Store, journal: Journal | None = None) -> None:
        self._handle = RegistryHandle(store, journal)
        self._opened: list[Run] = []
        self._exports: list[Export] = []
        self._transfers: Transfers | None = None

    def __repr__(self) -> str:
        return f"<Registry {self.url}>"

    def _repr_html_(self) -> str:
        from holdfast.registry.face.html import registry_html
        from holdfast.registry.values import markup

        return markup.safely("Registry", lambda: registry_html(self._handle))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def handle(self) -> RegistryHandle:
        """Its inner value, which other parts of Holdfast take; not for programs."""
        return self._handle

    @property
    def url(self) -> str:
        """Where it is, without secrets."""
        return self._handle.url

    @property
    def id(self) -> str:
        """The registry's own id; the same wherever it is mounted."""
        return self._handle.store.config.id

    @shows_options(NewRun)
    def create_run(self, run_id: str | None = None, **options: Unpack[NewRun]) -> Run:
        """Begin a run. Without a preset or a retention policy every checkpoint is kept.

        Args:
            run_id: Its name. Default: `YYYYMMDD_HHmmss_<seed hex8>`.
            preset: The rules of the run: `default`, `pretrain`, `finetune`, `sweep`, those of a
                system, or the path of a TOML file (`docs/presets.md`).
            overrides: Values that replace those of the preset, by path:
                `{"phases.main.tiers.training.retention.last": 5}`. Entries of a list go by name.
            config: The training configuration, plain values only. It is stored for ever, and
                everybody who can read the registry can read it: no secrets.
            seed: The master seed, from 0 to 2^64 - 1. Default: random.
            monitor: Decides which checkpoint is `best`; one or several.
            retention: Which checkpoints are kept. Default: the preset's policy, or all.
            input_hash: Any text that identifies the input data.
            owner: Whose run it is. Default: readers show the user who created it.
            project: What it belongs to.
            labels: Words to find it by, such as `["prod"]`. Versions of Holdfast that do not know
                these three, or `total_steps`, refuse a run that has one of them.
            total_steps: The step at which training is planned to end, in the present phase, as
                `step` counts it. Pages show progress and the time left.

        Raises:
            Conflict: A run of that name exists.
            InvalidInput: An argument is wrong: the name, a preset that is not valid, or a
                configuration that cannot be stored.
            NotFound: There is no such preset.
        """
        from holdfast.registry.history import RunOptions, creation

        return self._hold(self._handle.begin_run(run_id, creation(RunOptions(**options))))

    @shows_options(NewRun)
    def fork(
        self, source: Checkpoint | str, run_id: str | None = None, **options: Unpack[NewRun]
    ) -> Run:
        """Begin a run that continues from a checkpoint of another one. No data is copied.

        It inherits the checkpoint with its companions, the gates and artifacts, the streams up to
        it, and the pool with its ratings; releases and tags stay with the parent. The options are
        those of `create_run`, by default the parent's values, but for owner and labels; one of
        `preset`, `monitor` and `retention` replaces all three.

        Args:
            source: The checkpoint, or its ref.
            run_id: As for `create_run`.

        Raises:
            Conflict: A run of that name exists, or the checkpoint was evicted.
            NotFound: The checkpoint is not in this registry.
        """
        from holdfast.registry.curation import inherit, inheritance
        from holdfast.registry.history import RunOptions, forked

        own = RunOptions(**options)
        if isinstance(source, str):  # it names a state as of now, saves under way included
            for one in self._opened:
                if one.id == source.partition("/")[0]:
                    one.wait(remote=True)
        checkpoint = self.checkpoint(source) if isinstance(source, str) else source
        inherited = inheritance(self._handle.store, checkpoint)
        parent = self._handle.open_log(checkpoint.run_id).run
        run = self._hold(self._handle.begin_run(run_id, forked(parent, inherited.parent, own)))
        inherit(run.handle.committer, inherited)
        return run

    @shows_options(NewRun)
    def run(
        self,
        run_id: str | None = None,
        *,
        create: bool = False,
        group: Group | None = None,
        **options: Unpack[NewRun],
    ) -> Run:
        """Open a run, to continue it or to read it.

        The options of `create_run` create the run, or are compared with those of the run.

        Args:
            run_id: Its name. Default: the environment variable `HOLDFAST_RUN`.
            create: Create the run if it does not exist: the same line of a job script then starts
                it and, after a requeue, continues it.
            group: The ranks of a job that save together, such as `holdfast.distributed.TorchGroup`:
                every rank opens the run and calls `save`. Rank 0 reads it, and tells the others.
                Default: this process saves alone.

        Raises:
            InvalidInput: A group was given, and the registry has a journal.
            NotFound: There is no such run; near names are suggested.
            Conflict: It was begun with other monitors, another preset, seed or input hash; or it
                was dropped, and `create` is given. Another configuration is only warned of, unless
                the preset's `must_match` demands it.
            IntegrityError: Its log is damaged.
            RankFailed: With a group: rank 0 is dead or late.
        """
        from holdfast.registry.history import RunOptions, check_not_dropped, check_same, creation

        name = os.environ.get("HOLDFAST_RUN") if run_id is None else run_id
        if name is None:
            raise InvalidInput("no run is named", hint="Pass its id, or set HOLDFAST_RUN.")
        if group is not None and self._handle.journal is not None:
            raise InvalidInput(
                "ranks that save together do not use a journal",
                where="group",
                hint="Carry what is only in it (`holdfast journal push`), or the ranks continue "
                "from an older checkpoint; then open the registry with journal=''.",
            )
        wanted = RunOptions(**options)

        def read() -> RunLog:
            log = self._handle.open_copy(name) or self._handle.open_log(name, must_exist=not create)
            if log.run.commits == 0 and not self._handle.begin(log, creation(wanted)):
                log.refresh()
            if create:
                check_not_dropped(log.run)
                log.make_durable()  # the caller may rely on the run
            return log

        if group is None:
            log = read()
        else:
            from holdfast.registry.saving.collective import open_together

            log = open_together(group, self._handle.store, name, read)
        check_same(log.run, wanted)
        return self._hold(log, group, wanted.compared)

    def run_names(self) -> list[str]:
        """Return the names of all runs, sorted; `run` opens one, `runs_table` describes all."""
        return self._handle.run_names()

    def runs_table(
        self,
        *,
        where: str = "",
        since_s: float | None = None,
        limit: int | None = None,
        max_age_s: float = 0,
    ) -> Any:
        """Return a row for each run as a `pyarrow.Table`, sorted by name.

        docs/notebooks.md lists the columns; `config.lr` is a value of the configurations. A run
        that cannot be read has the status `damaged` and its error. This opens each run, several at
        once: four to twelve requests for most. What was read is kept on this machine: the next
        time, only the runs that changed are opened. In an upgraded registry in which `gc` runs, a
        few requests find them; elsewhere one for each run.

        Args:
            where: A filter: `lr < 1e-3 and status=failed and name~vit`; see docs/cli/start.md.
            since_s: Only runs with a save in the last `since_s` seconds.
            limit: Only the `limit` runs with the newest saves.
            max_age_s: A run that was read or asked by this machine at most so long ago is not
                asked again: the row may be that old.

        Raises:
            InvalidInput: The filter is none, or pyarrow is not installed.
            StoreUnavailable: The store does not answer.
        """
        from holdfast.registry.history import RunLog
        from holdfast.registry.tables import RunChoice, run_table

        choice = RunChoice(where, since_s, limit)

        def read(name: str) -> RunLog:
            log = RunLog(self._handle.store, name)
            log.open()
            return log

        return run_table(self._handle.store, self.run_names(), read, choice, max_age_s=max_age_s)

    def plot(
        self,
        runs: Iterable[str],
        metrics: str | Iterable[str] | None = None,
        *,
        phase: int | str | None = None,
        x: Axis = "step",
    ) -> Any:
        """Return a `plotly.graph_objects.Figure` of several runs, one colour for each.

        Args:
            runs: Names of runs.
            metrics: Metrics, or labels of monitors; a run that lacks them all is skipped. Default:
                the monitors of each run; without any, its first 8 metrics.
            phase: Only checkpoints of this phase.
            x: `step` (counted within the phase), `time` of the save in UTC, or `commit`.

        Raises:
            InvalidInput: plotly is not installed, or there is no such axis.
            NotFound: There is no such run, or no run has such a metric.
        """
        from holdfast.registry.history import check_phase
        from holdfast.registry.plots import plot_runs

        name = None if phase is None else check_phase(phase)
        logs = [self._handle.open_log(one) for one in runs]
        return plot_runs(logs, metrics, phase=name, x=x)

    def diff_runs(self, first: str, second: str) -> Branches:
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
        from holdfast.registry.comparing import compare_runs

        one, two = (self._handle.open_log(name) for name in (first, second))
        return compare_runs(self._handle.store, one, two)

    def rank_config(
        self, monitor: Monitor | None = None, *, runs: Iterable[str] | None = None
    ) -> Ranking:
        """Rank the keys of configurations by how strongly they go with a metric over several runs.

        Each run counts once, with its best value; what a fork inherited does not count. It does not
        say that a key is the cause (docs/cli/look.md). Damaged runs are in `.damaged`.

        Args:
            monitor: The metric; by default the one that decides the best in most of the runs.
            runs: Names of runs, such as `runs_table(where=...)["run"]` has; by default all.

        Raises:
            InvalidInput: Fewer than six runs have a finite value.
            NotFound: There is no such run.
        """
        from holdfast.registry.comparing import rank_config

        names = dict.fromkeys(self.run_names() if runs is None else map(str, runs))
        damaged: dict[str, RegistryError] = {}

        def read(name: str) -> RunManifest | None:
            try:
                return self._handle.open_log(name).run
            except IntegrityError as error:
                damaged[name] = error
                return None

        found = self._handle.store.pools.bulk.map(read, names)
        return rank_config([run for run in found if run is not None], monitor, damaged)

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
        from holdfast.registry.comparing import diff

        old, new = (
            self.checkpoint(one) if isinstance(one, str) else one for one in (before, after)
        )
        return diff(old.handle, new.handle, values=values)

    def attest(
        self,
        path: str | os.PathLike[str],
        ref: str | None = None,
        *,
        format: str | None = None,  # noqa: A002
        most: int = 200,
        max_bytes: int | None = None,
    ) -> Attestation:
        """Say which checkpoint's bytes a file has, tensor by tensor, from digests alone.

        Only manifests are read from the registry. A file of `safetensors`, `torch`, `npz` or `hf`
        is hashed chunk by chunk; other formats are read whole, as by a push.

        Args:
            path: The file, or a folder of Hugging Face.
            ref: The state to compare it with. Default: those of the runs, the newest first, until
                one matches as a whole.
            format: As for `holdfast.formats.read`, which has the errors of a file too.
            most: Without `ref`, the most states to compare it with.
            max_bytes: As for `holdfast.formats.read`.

        Raises:
            NotFound: The ref names nothing.
            IntegrityError: The manifest of the state that `ref` names is damaged or gone.
        """
        from holdfast.registry import formats
        from holdfast.registry.face.attesting import attest, compare

        named = None if ref is None else self.stored(ref).handle
        file = formats.digest(Path(path), format, max_bytes)
        return attest(self._handle, file, most) if named is None else compare(named, file)

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
        from holdfast.registry.loading import Checkpoint

        found = self.stored(ref)
        if not isinstance(found, Checkpoint):
            raise InvalidInput(
                "this is a stored state and no checkpoint",
                where=found.ref,
                hint=Hint(
                    "reg.stored(ref) returns it, with `load` and `load_into`.",
                    "`holdfast show` describes it, and `holdfast pull` writes it to a file.",
                ),
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
        from holdfast.registry.face.refs import find_by_id, find_in_run, is_digest, stored_ids

        if not isinstance(ref, str):
            raise InvalidInput(
                "not a ref", expected="a text such as 'RUN/latest'", found=quoted(ref)
            )
        name, _, path = ref.partition("/")
        if not path and is_digest(name):
            ids = self._handle.store.pools.bulk.submit(stored_ids, self._handle.store, name)
            runs, open_log = self.run_names(), partial(self._handle.open_log, by_id=True)
            if name.removeprefix("sha256:") not in runs:
                return find_by_id(self._handle.store, runs, open_log, name, ids.result())
        log = self._handle.open_log(name, by_id=is_digest(path))
        return find_in_run(self._handle.store, log, path)

    @contextmanager
    def progress(
        self, label: str = "", *, total: int | None = None, report: Progress | None = None
    ) -> Iterator[None]:
        """Show a bar of the bytes to and from the store while the block runs.

        In a notebook the bar is an output of the cell, elsewhere a line on stderr if that is a
        terminal. It counts what this handle moves, in any thread.

        Args:
            label: Text beside the bar.
            total: The expected number of bytes, such as `checkpoint.size_bytes`.
            report: Called with the bytes so far, by any thread, in the place of the bar.
        """
        from holdfast.registry.store import Transfers, bar

        if self._transfers is None:
            self._transfers = Transfers(self._handle.store)
        shown = nullcontext(report) if report is not None else bar(label, total)
        with shown as tell, self._transfers.observed(tell):
            yield

    def export_metrics(self, target: str | os.PathLike[str], *, runs: bool = False) -> None:
        """Show what this process saves, waits for and fails at to Prometheus, until the close.

        `docs/operations.md` lists the metrics. They count for the process, not for the registry.

        Args:
            target: `:PORT` of this machine, `HOST:PORT`, or the path of a file `*.prom` for the
                textfile collector, which is replaced every 15 seconds and at the end.
            runs: Whether names of runs are shown.

        Raises:
            InvalidInput: The target cannot be used, or the extra `metrics` is not installed.
        """
        from holdfast.registry.face.metrics import Export

        self._exports.append(Export(target, runs=runs, journal=self._handle.journal))

    def close(self) -> None:
        """Finish saves under way, stop the threads, close the connections."""
        runs, self._opened = self._opened, []
        with ExitStack() as stack:  # the store last, even if a run's last save failed
            for one in self._exports:
                stack.callback(one.close)
            stack.callback(self._handle.store.close)
            for run in runs:
                stack.callback(run.close)

    def _hold(
        self, log: RunLog, group: Group | None = None, compared: frozenset[str] = frozenset()
    ) -> Run:
        from holdfast.registry.face.run import Run

        run = Run(self._handle.run_handle(log, group), compared)
        self._opened.append(run)
        return run

    @shows_options(VerifyOptions)
    def verify(self, **options: Unpack[VerifyOptions]) -> VerifyReport:
        """Check the registry: its structure, and with `deep` every byte of it; it may be in use.

        Args:
            deep: Read and hash every byte, instead of comparing names and sizes only.
            sample: Read and hash this share of the packs' bytes, above 0 and at most 1; each call
                chooses another one at random.
            resume: A local file that records the packs that were read, so that an interrupted
                verification can continue; with `sample` each call reads another share until
                everything was read. Implies `deep` if `sample` is not given, as does `decode`.
            decode: Also decode every compressed chunk and hash the result: proves that the writer
                encoded the right bytes. Takes about as long as loading each checkpoint.
            heads: A local file that `write_heads` wrote, for this registry or its original: a log
                that is shorter than there, different or gone is an error.
            write_heads: A local file for the heads of all runs; written if no error was found.
            since_last: Do not read again what the last call with `since_last` on this machine found
                whole, and is as it was by names, sizes and times; but a thirtieth of it.
            shard: `I/N` with N up to 256: check all logs, and of packs, manifests and placements
                this one of N parts of the keys. The parts may be on different machines.
            signed: Files or folders with the public keys that you trust: each commit of each run
                has to be signed with one of them. `.vouched` of the report says who signed what.
            executor: Its workers read and hash, in other processes or on other machines that reach
                the registry by the same URL (docs/scale.md). Default: threads.
            progress: Called with the number of bytes checked so far.

        Raises:
            InvalidInput: `sample` or `shard` is none, a file cannot be read, written or used, or
                the executor's workers cannot reach the registry.
            StorageError: The store did not answer; with `resume` the next call continues there.
            WorkersFailed: The executor's workers died; likewise.
        """
        from holdfast.registry.upkeep import note_verify, verify

        report = verify(self._handle.store, **options)
        note_verify(self._handle.store, report, is_part=options.get("shard") is not None)
        return report

    def sign(self, key: str, runs: Iterable[str] | None = None) -> list[SignedRun]:
        """Sign the newest commit of runs, and thereby all commits before it (`docs/security.md`).

        Each log is read whole first, and compared with the heads that this machine has seen.

        Args:
            key: An Ed25519 key: a file of PEM, `env:VARIABLE` or `agent:COMMAND`.
            runs: Names of the runs. Default: all.

        Raises:
            InvalidInput: The key cannot be used.
            NotFound: There is no such run.
            IntegrityError: A log is damaged, or not the one that was seen; runs before it are
                signed.
            Conflict: This key has signed another history of the run.
            Frozen: The registry may not be written.
        """
        from holdfast.registry.upkeep import sign_runs

        return sign_runs(self._handle.store, key, runs)

    @shows_options(GcOptions, grace_s=DAY_S, forget=(), accept=())
    def gc(self, **options: Unpack[GcOptions]) -> GcReport:
        """Delete objects that no run needs, while others write (`docs/collection.md`).

        It is safe beside any number of writers and other collections, for any clocks. The next
        collection finishes a killed one.

        Args:
            grace_s: Seconds, by the store's clock, for which objects stay after they were stored or
                evicted.
            forget: Runs to give up for ever, because they cannot be read and would stop every
                collection. What only such a run needs is collected, and nothing may be written to
                it any more, even if it is mended.
            accept: Runs whose logs count as they are, although collections have read other ones: a
                mirror or a backup put them back. Commits that are not in these logs are given up.
            full: Read every log from its first slot, and report the runs for which the notes of
                earlier collections differ. One collection in 30 does so by itself.
            dry_run: Only report what would be deleted, by the age on this machine's clock.
            shard: `I/N` with N up to 256: delete only objects in this one of N parts of the keys.
                Each is a collection of its own, which reads and marks all runs.
            executor: Its workers read placements, as for `verify`; all else is done here.
            progress: Called with the number of bytes deleted so far.

        Raises:
            InvalidInput: A run in `forget` can be read: drop it instead. Or `shard` is no shard, or
                the executor's workers cannot reach the registry.
            NotFound: A run in `forget` does not exist, and this machine has never seen it. Or one
                in `accept` does not exist, or nothing says that its log was another one.
            IntegrityError: Something is unreadable or unknown; nothing was deleted.
            UnsupportedFormat: A newer Holdfast wrote something; nothing was deleted.
            StoreUnsuitable: A symbolic link is in the registry; nothing was deleted.
            WorkersFailed: The executor's workers died; nothing was deleted.
        """
        from holdfast.registry.upkeep import collect

        return collect(self._handle.store, **options)

    def upgrade(self) -> UpgradeReport:
        """Raise the least writer version of the registry to that of this program, for good.

        Newer rules begin with it: sweeps in parts, which writers need not read whole. Do it when
        every writer is upgraded: programs of an older version can then only read, and training
        that runs with one fails. Repeating it is safe, and finishes an upgrade that was killed.

        Raises:
            IntegrityError: A run cannot be read; the other runs may be marked already.
            UnsupportedFormat: A newer Holdfast wrote something.
        """
        from holdfast.registry.upkeep import upgrade

        return upgrade(self._handle.store)

    def freeze(self, moved_to: str | None = None) -> FreezeReport:
        """Forbid everybody to write to this registry, until `thaw`; reading goes on.

        Each writer gets `Frozen` at its next commit: none lands once this call has returned.
        Older programs are refused for good, as by `upgrade`. Repeating it is safe, and finishes a
        freeze that was killed (docs/guides/operator.md).

        Args:
            moved_to: The URL where the registry goes on, for the messages of writers and readers.
                It may hold no credentials.

        Raises:
            InvalidLocation: It is no URL of a registry, or has credentials.
            IntegrityError: A run cannot be read; the other runs may be frozen already.
        """
        from holdfast.registry.upkeep import freeze

        return freeze(self._handle.store, moved_to)

    def thaw(self) -> FreezeReport:
        """Allow writing again after `freeze`.

        If training went on at the new place meanwhile, the two histories diverge.
        """
        from holdfast.registry.upkeep import thaw

        return thaw(self._handle.store)

    def drop_rules(self, *, delay_s: float | None = None, keep: bool | None = None) -> DropRules:
        """Return the rules of a drop in this registry; set those that are given.

        To set them takes the rights of a collector, and refuses older programs for good, as
        `upgrade` does. They also hold for runs that were dropped before.

        Args:
            delay_s: Seconds from a drop to the collection that may free the run, by the store's
                clock; 7 days where it was never set.
            keep: Let collections free nothing that evictions, thinnings and drops release: for a
                mirror that is to bring lost runs back. A collection reads every log in full then.

        Raises:
            InvalidInput: It is no number of seconds.
            Frozen: The registry may not be written.
        """
        from holdfast.registry.upkeep import set_drop_rules

        return set_drop_rules(self._handle.store, delay_s, keep)

    @property
    def moved_to(self) -> str | None:
        """Where this registry has moved to; empty if it is only frozen, `None` if it is not."""
        from holdfast.registry.history import Epochs

        epochs = Epochs.of(self._handle.store)
        return epochs.header(epochs.newest()).moved_to

    @shows_options(RepackOptions, min_dead=0.25)
    def repack(
        self, runs: Iterable[str] | None = None, **options: Unpack[RepackOptions]
    ) -> RepackReport:
        """Rewrite packs that are unneeded in part, and join small ones.

        Others may read, save, sync, collect and repack meanwhile. No id changes. The old packs stay
        until they are collected. Deltas whose bases nothing else needs are stored again if that
        takes fewer bytes. The next repack uses the work of an interrupted one.

        Args:
            runs: Only packs that these runs need; other runs that share one are changed with them.
            min_dead: Rewrite a pack if at least this share of its chunk bytes, above 0 and up to 1,
                is unneeded.
            compression: `auto`, `zstd` or `lz4`: compress raw chunks, if that saves enough; `none`:
                store everything raw, deltas too. Default: change no compression.
            keyframe_every: Cut chains of deltas, so that reading a chunk takes at most this many
                versions of it, 1 to 32. Default: cut none.
            dry_run: Only plan. To compress or cut, it reads and encodes the chunks.
            executor: Its workers make the new packs, as for `verify`; the plan and every commit are
                made here.
            progress: Called with the number of bytes written so far.

        Raises:
            InvalidInput: `min_dead`, `compression` or `keyframe_every` is out of range.
            NotFound: There is no such run.
            IntegrityError: Something is damaged or gone; nothing is lost by this.
            Conflict: Collections interrupted it too often.
            WorkersFailed: The executor's workers died; the next repack uses their work.
        """
        from holdfast.registry.upkeep.repacking import repack

        return repack(self._handle.store, runs, **options)

    def tier(
        self,
        refs: Iterable[str],
        storage_class: str | None = None,
        *,
        restore_days: int | None = None,
        dry_run: bool = False,
    ) -> TierReport:
        """Move the packs of states to another storage class of their bucket, or ask for them.

        No key, id or log changes. Not moved to an archive (`GLACIER`, `DEEP_ARCHIVE`) is what
        another state needs, or the newest checkpoint of a run in training. To read an archived
        state raises `Archived`.

        Args:
            refs: Of states, such as `RUN/phase1/step500`; the name of a run is all that it holds.
            storage_class: Where the packs go, by the name that S3 gives it, such as `GLACIER_IR`.
            restore_days: Ask for the archived ones instead: they can be read some hours later, for
                this many days.
            dry_run: Only count.

        Raises:
            InvalidInput: The store has no such class, or not exactly one of the two is given.
            NotFound: A ref names nothing.
            Archived: An archived pack has to be restored before it can be moved.
        """
        from holdfast.registry.upkeep import tier

        runs = set(self.run_names())
        chosen: dict[str, set[Digest] | None] = {}
        for ref in refs:
            if ref in runs:
                chosen[ref] = None
                continue
            state = self.stored(ref).handle
            if (found := chosen.setdefault(state.log.run_id, set())) is not None:
                found.add(state.digest)
        return tier(self._handle.store, chosen, storage_class, restore_days, dry_run=dry_run)

    def usage(self, *, executor: Executor | None = None) -> Usage:
        """Count the bytes on the store, by run and checkpoint.

        Args:
            executor: Its workers read placements and tables of packs, as for `verify`.

        Raises:
            IntegrityError: Something is damaged or gone.
            WorkersFailed: The executor's workers died.
        """
        from holdfast.registry.upkeep import measure

        return measure(self._handle.store, executor=executor)
