"""Find the stored state that a ref names, in a run that is open already."""

from __future__ import annotations

from holdfast.registry.errors import InvalidInput
from holdfast.registry.face import find_in_run, is_digest
from holdfast.registry.loading import Checkpoint, Stored
from holdfast.registry.ui.source import Source


def find(source: Source, ref: str) -> Stored:
    """Return exactly the stored state that a ref names; an id alone is searched in all runs."""
    name, _, path = ref.partition("/")
    if not path and is_digest(name):
        return source.registry.stored(ref)
    handle = source.run(name).handle
    return find_in_run(handle.store, handle.log, path)


def find_checkpoint(source: Source, ref: str) -> Checkpoint:
    """Return the checkpoint that a ref names, as `find` does."""
    found = find(source, ref)
    if not isinstance(found, Checkpoint):
        raise InvalidInput(
            "this is a stored state and no checkpoint",
            where=found.ref,
            expected="a checkpoint, such as RUN/latest",
        )
    return found


def source_of(stored: Stored) -> int | None:
    """Return the commit of the checkpoint that a release, artifact or entry was made from."""
    found = getattr(stored, "checkpoint", None)
    return found if isinstance(found, int) else None
