"""States that training did not make, and folders of other systems: `run.exchange`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Unpack, cast

from holdfast.registry.face.options import SaveOptions, StateOptions, shows_options
from holdfast.registry.loading import Checkpoint, Stored
from holdfast.registry.saving import RunHandle, SaveRequest, ask

if TYPE_CHECKING:
    from holdfast.registry.layouts import CheckoutReport, ImportedFile


class RunExchange:
    """Exchange with other programs: push or merge a state, import a folder or check one out.

    Nothing here takes the run over from its trainer.
    """

    def __init__(self, handle: RunHandle) -> None:
        self._handle = handle

    @shows_options(SaveOptions)
    def push(
        self,
        state: object,
        *,
        step: int,
        after: int | Literal["none"] | None = None,
        **options: Unpack[SaveOptions],
    ) -> Checkpoint:
        """Save a state that another program made; no trainer is fenced.

        All other arguments, the result and the errors are those of `Run.save`.

        Args:
            state: As for `Run.save`.
            step: Training step, update or epoch of the state.
            after: For a program that trains: step of the checkpoint that it continues from; `none`:
                it is a first start. The run is `running` again.

        Raises:
            Conflict: The newest checkpoint of the run is not that of `after`, so another process
                has continued the run. A state that the run has at this step is no conflict.
        """
        request = ask(self._handle, step, takes_over=False, after=after, **options)
        return self._handle.saver.pipeline.save(state, request)

    @shows_options(StateOptions)
    def merge(
        self,
        sources: Iterable[Stored],
        *,
        step: int,
        average: str | Iterable[str] | None = None,
        weights: Sequence[float] | None = None,
        pick: Mapping[str, Stored] | None = None,
        **options: Unpack[StateOptions],
    ) -> Checkpoint:
        """Save a state that is made of others: some tensors averaged, the rest picked.

        Committed like `push`: the run keeps its trainer. Tensors that are picked, or equal in all
        sources, are not stored again; the rest is computed chunk by chunk, in less than 256 MiB.
        The checkpoint's meta names the sources, under `merge`. All other options are those of
        `Run.save`; but `storing` has no `precision`, no differences are made, and `meta` is a
        mapping without the key `merge`.

        Args:
            sources: Checkpoints, or other stored states, of any run of this registry. They have the
                same structure, and are equal in everything that is neither averaged nor picked.
            step: Step of the new checkpoint.
            average: Components to average, or patterns of tensors' paths. Default: all floating
                tensors that differ, except optimizer state. Sums are taken in float32 (in float64
                for float64) and rounded once to the stored dtype; equal elements keep every bit.
            weights: A number for each source; their sum is 1. Default: equal weights.
            pick: Any stored state to take a component from, by its name or a pattern of paths.

        Raises:
            InvalidInput: The weights do not fit the sources, or a name or pattern matches nothing,
                or nothing that an earlier one does not match.
            UnsupportedValue: An average of finite numbers is not finite in the stored type.
            NotFound: A component, path or source is not there.
            IncompatibleState: The sources have different structures, or differ in something that is
                neither averaged nor picked; the message names the paths.
            Conflict: A source was evicted, or the step holds another state already.
            IntegrityError: A source is damaged or gone.
        """
        from holdfast.registry.deriving.merging import merge

        self._handle.saver.pipeline.settle()
        self._handle.committer.await_earlier()  # the sources may be among those saves
        meta = cast("Mapping[str, object] | None", options.pop("meta", None))
        request = SaveRequest.of(step, takes_over=False, **options)
        return merge(self._handle.committer, sources, request, average, weights, pick, meta)

    def checkout(
        self, root: str | os.PathLike[str], *, layout: str | None = None
    ) -> CheckoutReport:
        """Write the run as the folder of a system, or bring such a folder up to date.

        Every file is whole or absent, links are relative and replaced atomically. What an earlier
        checkout has made and the run has no longer is removed; files that it has not made, or that
        were changed, are left alone. No file shares memory with the registry: edit them freely.

        Args:
            root: The folder; it is made if it does not exist.
            layout: `hydra`, `adr004`, `andrea`, `thalia`, `cobre` or `hf`. Default: that of the
                run's preset.

        Returns:
            The names of files that were written, kept, removed and left alone.

        Raises:
            InvalidInput: There is no such layout, or a name cannot be that of a file.
            IncompatibleState: A state does not fit the formats of the layout.
            Conflict: The folder is a checkout of something else, or another checkout is running.
            IntegrityError: An object is damaged.
            StoreFull: The disk is full.
        """
        from holdfast.registry.layouts import check_out_as

        return check_out_as(self._handle.committer, root, layout)

    def import_tree(
        self,
        root: str | os.PathLike[str],
        *,
        layout: str | None = None,
        table: str | os.PathLike[str] | None = None,
        dry_run: bool = False,
    ) -> list[ImportedFile]:
        """Take the folder of a system into this run: each file once, verified, in its order.

        A file whose `.sha256` file says something else is refused, and so is one that breaks its
        format; the others are taken in. A second import takes in only what is new.

        Args:
            root: The folder.
            layout: As for `checkout`.
            table: For `andrea`: a JSON file with the names and shapes of the parameters.
            dry_run: Read and check everything, and commit nothing.

        Returns:
            A report for each file, in the order in which they were taken in.

        Raises:
            InvalidInput: There is no such folder or layout, or two names in the folder would be one
                file on some systems.
            StorageError: The registry or the folder failed; what was taken in before stays.
        """
        from holdfast.registry.layouts import import_from

        return import_from(self._handle.committer, root, layout, table, dry_run=dry_run)

    def watch_folder(
        self,
        root: str | os.PathLike[str],
        *,
        layout: str | None = None,
        table: str | os.PathLike[str] | None = None,
        quiet_s: float = 10.0,
        poll_s: float = 1.0,
        longest_poll_s: float = 10.0,
        timeout_s: float | None = None,
    ) -> Iterator[ImportedFile]:
        """Follow a folder into which a program writes: yield each file once it was taken in.

        A file is taken in once, when its content or size says by the rules of the layout that it is
        complete, or when it was quiet for a while.

        Args:
            root: The folder.
            layout: As for `checkout`.
            table: As for `import_tree`.
            quiet_s: Seconds without a change after which a file counts as complete if its content
                cannot tell.
            poll_s: Seconds between looks at the folder; twice as long after each look that finds
                nothing new.
            longest_poll_s: The longest time between two looks.
            timeout_s: End after this many seconds without a new file. Default: never.

        Raises:
            InvalidInput: As for `import_tree`, or a time is not legal.
            StorageError: The registry or the folder failed.
        """
        from holdfast.registry.layouts import watch_folder
        from holdfast.registry.loading.following import Patience

        return watch_folder(
            self._handle.committer,
            root,
            layout,
            table,
            quiet_s=quiet_s,
            patience=Patience(poll_s, longest_poll_s, timeout_s),
        )
