"""`journal ls`, `push` and `rm`: saves that are only on this machine."""

from __future__ import annotations

from typing import Any

import typer

from holdfast.registry.cli import describe, options, output
from holdfast.registry.cli.columns import Column, numbers
from holdfast.registry.cli.command import Answer, answer_of, command, listed
from holdfast.registry.cli.describe import iso, picked
from holdfast.registry.cli.opening import writes
from holdfast.registry.cli.options import argument, flag, option
from holdfast.registry.errors import (
    Conflict,
    InvalidInput,
    NotFound,
    RegistryError,
    StoreUnavailable,
)
from holdfast.registry.face import Registry, Run
from holdfast.registry.history import RunLog
from holdfast.registry.saving.journal import (
    FOLDER_VARIABLE,
    Carrier,
    Journal,
    Listed,
    Note,
    RunFolder,
    pushing,
    run_folders,
)
from holdfast.registry.values import HERE

_JOURNAL = option("--journal", "DIR", "Folder of the journal.", envvar=FOLDER_VARIABLE)


_LS = (
    Column("run"),
    *numbers("entry"),
    Column("save", none="-"),
    Column("outcome"),
    *numbers("size=size_bytes", text=output.size, drop=1),
    *numbers("age=saved", text=describe.age, none="-", drop=2),
)


@command(table=True)
def ls(*, journal: str | None = _JOURNAL) -> Answer:
    """List the saves that are not in the registry.

    Waiting saves are carried by the next program with this journal, or by `journal push`. For
    the others --json gives the reason.
    """
    saves = [
        (registry_id, folder.run_id, one)
        for registry_id, folder in run_folders(_journal(journal))
        for one in pushing.listed(folder)
    ]
    return listed(
        _LS,
        saves,
        lambda save: _json(*save),
        more=lambda save: {"save": save[2].entry and save[2].entry.title},
        none="the registries have everything",
    )


def _carry(opened: Registry, journal: str | None) -> Answer:
    failed: dict[str, RegistryError] = {}
    found = [
        _carried(opened, folder, failed)
        for registry_id, folder in run_folders(_journal(journal))
        if registry_id == opened.id
    ]
    text = [f"{one['run']}: {one['carried']} carried, {one['waiting']} waiting" for one in found]
    return Answer(lambda: found, lambda: text, damaged=failed)


def _carried(
    opened: Registry, folder: RunFolder, failed: dict[str, RegistryError]
) -> dict[str, Any]:
    notes: list[Note] = []
    try:
        if folder.waiting():
            Carrier(opened.handle.store, folder, lambda _, note: notes.append(note)).carry()
    except StoreUnavailable:  # every other run would wait for the registry as long
        raise
    except RegistryError as error:  # one run, or a copy of its folder, does not stop the others
        failed[folder.run_id] = error
        HERE.fail(error, "journal")
    carried = sum(note.outcome == "carried" for note in notes)
    return {"run": folder.run_id, "carried": carried, "waiting": len(folder.waiting())}


@command(writes, url=True, metrics=True)
def push(
    opened: Registry,
    *,
    run: str | None = argument("RUN", "A run with stranded or refused saves.", default=None),
    fork: str | None = argument(
        "FORK", "Name of the new run, or of the one that an earlier push made.", default=None
    ),
    url: str | None = option("--to", "URL", "Another registry, if the run's registry is lost."),
    origin: str = option("--from", "ID", "Id of the lost registry, or its begin.", default=""),
    journal: str | None = _JOURNAL,
) -> Answer:
    """Add waiting saves to their runs, or stranded ones to a fork.

    Without RUN all saves that wait are added, but those of runs that a program carries at the
    moment. With RUN its stranded and refused saves go into the run FORK, which begins at the last
    kept checkpoint before another machine took the run over. Afterwards the journal deletes the
    bytes of these saves. With --to all saves that the journal has for a lost registry go into a run
    of another one: those that wait too, which never enter their own.
    """
    if run is None:
        return _carry(opened, journal)
    if fork is None:
        raise typer.BadParameter("name the run that gets the stranded saves: RUN FORK")
    if url is not None:
        folder = _lost(opened, run, journal, origin)
        target = opened.run(fork) if fork in opened.run_names() else opened.create_run(fork)
        return _pushed(target, pushing.rescue(target.handle.committer, folder))
    folder = _folder(opened, run, journal)
    lost = (one for one in pushing.listed(folder) if one.outcome in ("stranded", "refused"))
    first = next((one for one in lost if one.entry is not None), None)
    if first is None:
        raise NotFound(
            "no stranded or refused save of this run is in the journal",
            where=folder.path,
            hint="`holdfast journal ls` lists the entries.",
        )
    target = (
        opened.run(fork) if fork in opened.run_names() else _forked(opened, folder, first, fork)
    )
    return _pushed(target, pushing.push(target.handle.committer, folder))


def _pushed(target: Run, pushed: list[Listed]) -> Answer:
    saved = [target.id, *(one.entry.title for one in pushed if one.entry)]
    return answer_of({"run": target.id, "pushed": saved[1:]}, *saved)


@command(writes)
def rm(
    opened: Registry,
    *,
    run: options.NamedRun,
    entry: int = argument("ENTRY", "Number of the entry, as `journal ls` shows it.", min=1),
    yes: bool = flag("--yes", "Delete the bytes: nobody else has them."),
    journal: str | None = _JOURNAL,
) -> str:
    """Delete a save that was stranded, refused or damaged."""
    folder = _folder(opened, run, journal)
    if not yes:
        raise InvalidInput(
            "nothing was deleted",
            where=f"{run}: entry {entry}",
            hint="Give --yes: the registry does not have this save.",
        )
    return f"deleted: {run}, entry {pushing.delete(folder, entry).number}"


def _forked(opened: Registry, folder: RunFolder, first: Listed, name: str) -> Run:
    assert first.entry is not None  # only such entries are pushed
    log = RunLog(opened.handle.store, folder.run_id)
    run = log.open()
    n = pushing.fork_point(log, folder, first.entry)
    if n is not None:
        return opened.fork(opened.run(folder.run_id).history.checkpoint(n), name)
    created = run.created
    if created is None:
        raise Conflict("the run of these saves is not in this registry", where=folder.run_id)
    return opened.create_run(
        name, preset=created.spec, monitor=created.monitors, seed=int(created.seed, 16)
    )


def _journal(path: str | None) -> Journal:
    if not path:
        raise InvalidInput(
            "no journal is named", hint=f"Give --journal DIR, or set {FOLDER_VARIABLE}."
        )
    return Journal(path)


def _folder(opened: Registry, run: str, path: str | None) -> RunFolder:
    found = RunFolder(_journal(path), opened.id, run)
    if not found.exists:
        raise NotFound("the journal has nothing of this run", where=found.path)
    return found


def _lost(opened: Registry, run: str, path: str | None, origin: str) -> RunFolder:
    """Return the journal of a run of another registry than the one that is open."""
    found = {
        registry_id: folder
        for registry_id, folder in run_folders(_journal(path))
        if folder.run_id == run and registry_id != opened.id and registry_id.startswith(origin)
    }
    if len(found) != 1:
        raise NotFound(
            "the journal has not exactly one run of this name of another registry",
            where=run,
            found=", ".join(found) or "none",
            hint="`holdfast journal ls --json` lists the registries; --from names one.",
        )
    return next(iter(found.values()))


def _json(registry_id: str, run: str, one: Listed) -> dict[str, Any]:
    entry = one.entry
    save = entry.save if entry else None
    return {
        "registry": registry_id,
        "run": run,
        **picked(one, "entry=number outcome reason"),
        "phase": save.phase if save else None,
        "step": save.step if save else None,
        "id": save.place.manifest if save else None,
        "status": entry.status if entry else None,
        "saved": iso(entry.time_ms) if entry else None,
        "size_bytes": one.size_bytes,
    }
