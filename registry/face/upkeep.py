"""The maintenance of an open registry: verify, repair, collect, repack, count bytes."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from concurrent.futures import Executor
from contextlib import ExitStack
from typing import TYPE_CHECKING

from holdfast.registry.face import rooms
from holdfast.registry.history import DAY_S
from holdfast.registry.objects.codecs import Compression
from holdfast.registry.store import Address, Store, open_store

if TYPE_CHECKING:
    from holdfast.registry.face.rooms import (
        GcReport,
        Progress,
        RepackReport,
        RepairReport,
        Usage,
        VerifyReport,
    )


class MaintainedRegistry:
    """The part of a registry that keeps its store sound and small."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @property
    def store(self) -> Store:
        """The objects behind it, for maintenance."""
        return self._store

    def verify(
        self,
        *,
        deep: bool = False,
        sample: float | None = None,
        resume: str | os.PathLike[str] | None = None,
        decode: bool = False,
        heads: str | os.PathLike[str] | None = None,
        write_heads: str | os.PathLike[str] | None = None,
        executor: Executor | None = None,
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
            executor: Its workers read and hash, in other processes or on other machines that reach
                the registry by the same URL (docs/scale.md). Default: threads.
            progress: Called with the number of bytes checked so far.

        Returns:
            A report with `.ok` and `.findings`.

        Raises:
            InvalidInput: `sample` is no share, `resume` is a file of another kind or registry, or
                a file of heads cannot be read or written; or the executor's workers cannot reach
                the registry.
            StorageError: The store did not answer; with `resume` the next call continues there.
            WorkersFailed: The executor's workers died; likewise.
        """
        report = rooms.verify(
            self._store,
            deep=deep,
            sample=sample,
            resume=resume,
            decode=decode,
            heads=heads,
            write_heads=write_heads,
            executor=executor,
            progress=progress,
        )
        rooms.note_verify(self._store, report)
        return report

    def repair(
        self,
        mirror: str | os.PathLike[str] | MaintainedRegistry,
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
            if isinstance(mirror, MaintainedRegistry):
                source = mirror.store
            else:
                source = open_store(Address(mirror), read_only=True)
                stack.callback(source.close)
            return rooms.repair(self._store, source, deep=deep, dry_run=dry_run, progress=progress)

    def gc(
        self,
        *,
        grace_s: float = DAY_S,
        forget: Collection[str] = (),
        dry_run: bool = False,
        progress: Progress | None = None,
    ) -> GcReport:
        """Delete objects that no run needs, while others write (`docs/collection.md`).

        It is safe beside any number of writers and other collections, for any clocks. The next
        collection finishes a killed one.

        Args:
            grace_s: Seconds, by the store's clock, for which objects stay after they were stored or
                evicted.
            forget: Runs to give up for ever, because they cannot be read and would stop every
                collection. Objects that only such a run needs are collected; what other runs need
                stays. Nothing may be written to the run any more, even if it is mended.
            dry_run: Only report what would be deleted; the age of objects is then computed by this
                machine's clock.
            progress: Called with the number of bytes deleted so far.

        Raises:
            InvalidInput: A run in `forget` can be read: drop it instead.
            NotFound: A run in `forget` does not exist, and this machine has never seen it.
            IntegrityError: Something is unreadable or unknown; nothing was deleted.
            UnsupportedFormat: A newer Holdfast wrote something; nothing was deleted.
            StoreUnsuitable: A symbolic link is in the registry; nothing was deleted.
        """
        return rooms.collect(
            self._store, grace_s=grace_s, forget=forget, dry_run=dry_run, progress=progress
        )

    def repack(
        self,
        runs: Iterable[str] | None = None,
        *,
        min_dead: float = 0.25,
        compression: Compression | None = None,
        keyframe_every: int | None = None,
        dry_run: bool = False,
        executor: Executor | None = None,
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
            executor: Its workers make the new packs, as for `verify`; the plan and every commit are
                made here.
            progress: Called with the number of bytes written so far.

        Raises:
            InvalidInput: `min_dead`, `compression` or `keyframe_every` is out of range.
            NotFound: There is no such run.
            IntegrityError: Something is damaged or gone; the chunks moved by then are sound, and
                nothing is deleted.
            Conflict: Collections interrupted it too often.
            WorkersFailed: The executor's workers died; the next repack uses their work.
        """
        return rooms.repack(
            self._store,
            runs,
            min_dead=min_dead,
            compression=compression,
            keyframe_every=keyframe_every,
            dry_run=dry_run,
            executor=executor,
            progress=progress,
        )

    def usage(self, *, executor: Executor | None = None) -> Usage:
        """Count the bytes on the store, by run and checkpoint.

        Args:
            executor: Its workers read placements and tables of packs, as for `verify`.

        Raises:
            IntegrityError: Something is damaged or gone.
            WorkersFailed: The executor's workers died.
        """
        return rooms.measure(self._store, executor=executor)
