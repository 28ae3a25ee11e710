"""Parts of faults, and the faults that tests of several documents notice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.systems.mutants import Mutant, always


class Lived(Mutant):
    """A fault that has to be there while the story is lived, not only when a test looks at it."""


#: Faults, each with the tests that notice it, by file.
Table = tuple[tuple[Mutant, dict[str, tuple[str, ...]]], ...]

#: The module that answers what a run holds.
RUN_MANIFEST = "registry.history.replay.run_manifest"


def nudged(state: Any) -> Any:
    """Return a state of which the first number of each array is another."""
    if isinstance(state, dict):
        return type(state)((key, nudged(value)) for key, value in state.items())
    if getattr(state, "shape", ()) and 0 not in state.shape and "bool" not in str(state.dtype):
        changed = state.clone() if hasattr(state, "clone") else state.copy()
        changed[(0,) * len(state.shape)] += 1
        return changed
    return state


def turned(state: Any) -> Any:
    """Return a dict in another order."""
    return dict(reversed(state.items())) if isinstance(state, dict) else state


def emptied(value: Any) -> Any:
    """Return an empty value in place of a plain one."""
    return type(value)() if isinstance(value, int | float | dict | list) else value


def then(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Change what a function returns."""
    return lambda old: lambda *args, **options: change(old(*args, **options))


def shown(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Change the value of a property."""
    return lambda old: property(lambda self: change(old.__get__(self)))


def refusing(old: Any) -> Any:
    """Raise an error in place of a function."""
    from holdfast.errors import IntegrityError

    def refuse(*_args: Any, **_options: Any) -> Any:
        raise IntegrityError("a fault", where=getattr(old, "__name__", ""))

    return refuse


def after_its_slot(old: Any) -> Any:
    """Put the objects of a commit after the slot that names them."""

    def attempt(self: Any, change: Any) -> Any:
        backend, late = self.store.backend, []
        put = backend.put_if_absent

        def put_late(key: str, body: Any) -> bool:
            if key.startswith("runs/"):
                return put(key, body)
            late.append((key, body if isinstance(body, bytes) else b"".join(body)))
            return True

        backend.put_if_absent = put_late
        try:
            return old(self, change)
        finally:
            del backend.put_if_absent
            for key, body in late:
                put(key, body)

    return attempt


class Report:
    """A verification that found something."""

    ok, findings = False, ("a fault",)


KEYS = Mutant(
    "keys that a phase requires are not looked for",
    "registry.saving.save_request",
    "check_keys",
    always(None),
)
DTYPES = Mutant(
    "dtypes are not looked at", "registry.saving.save_request", "check_dtypes", always(None)
)
ORDER = Mutant(
    "a state comes back in another order",
    "registry.loading.checkpoint",
    "Checkpoint.load",
    then(turned),
)
NUMBER = Mutant(
    "a number of a loaded state is another", "registry.loading.stored", "Stored.load", then(nudged)
)
BEST = Mutant(
    "the newest is best",
    RUN_MANIFEST,
    "RunManifest.best",
    lambda _: lambda self, monitor, phase=None: self.latest(phase),
)
OLDEST = Mutant(
    "the oldest is not listed", RUN_MANIFEST, "RunManifest.live", then(lambda found: found[1:])
)
COMMITS = Mutant("commits are not shown", "registry.face.history", "RunHistory.commits", always(()))
DAMAGED = Mutant(
    "a sound registry is called damaged",
    "registry.face.registry",
    "Registry.verify",
    always(Report()),
)
EARLY = Mutant(
    "a commit comes before the objects that it names",
    "registry.writing.committer",
    "Committer._attempt",
    after_its_slot,
)
STATUS = Mutant(
    "a loop that is asked to stop exits with 143",
    "registry.saving.loop.checkpointer",
    "Checkpointer._exit_code",
    always(143),
)
STREAM = Mutant(
    "the last entry of a stream is lost",
    "registry.curation.streams.stream",
    "Stream.read",
    then(lambda found: found[:-1]),
)
KEPT = Mutant(
    "time and numbers of a save are part of the state",
    "registry.saving.save_request",
    "_split",
    lambda _: lambda state, _spec: (state, None),
)
KEPT_LIVED = Lived("time and numbers are part of a state while it is lived", *KEPT[1:])
PLAIN = Mutant(
    "plain values of a state come back empty",
    "registry.loading.checkpoint",
    "Checkpoint.load",
    then(lambda state: {name: emptied(value) for name, value in state.items()}),
)
ALL_KEPT = Lived("nothing is evicted", "registry.history.retention", "_Group.evicted", lambda _: ())
