"""IPython and Jupyter: completion of runs, refs, names and paths within the strings of calls.

`%load_ext holdfast.ipython` switches it on. In `reg.checkpoint("digits/la` the completer looks up
`reg` among the variables of the session, and calls nothing but Holdfast: names of runs take one
listing, refs and names of a run read its log, paths of a checkpoint its manifest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from IPython.core.completer import SimpleCompletion, context_matcher

from holdfast.registry.errors import RegistryError
from holdfast.registry.face import Registry, Run, refs_of
from holdfast.registry.history import RunLog
from holdfast.registry.loading import Checkpoint, Stored
from holdfast.registry.objects import check_run_id

if TYPE_CHECKING:
    from IPython.core.completer import CompletionContext, SimpleMatcherResult
    from IPython.core.interactiveshell import InteractiveShell

#: `name.method(arguments "begun`, at the end of the text before the cursor; the method may have
#: dots, as in `run.pins.tags.get("`, and an index counts as a call, as in `run.streams["`.
_CALL = re.compile(r"(?<![\w.)\]])(\w+)\.([\w.]+)[(\[]([^()]*)(['\"])([^'\"()]*)$")
_MATCHER = "holdfast"
#: Methods of a run whose first argument is a phase; others have `phase=`.
_OF_PHASES = ("best", "checkpoints", "latest", "history.table", "phases.monitor")
#: The most completions that are offered.
_MOST = 500


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Switch completion on: `%load_ext holdfast.ipython`."""
    unload_ipython_extension(shell)

    @context_matcher(identifier=_MATCHER)  # type: ignore[untyped-decorator]
    def match(context: CompletionContext) -> SimpleMatcherResult:
        found = _CALL.search(context.text_until_cursor)
        if found is None:
            return {"completions": []}
        name, method, before, _, begun = found.groups()
        names = list(completions(shell.user_ns.get(name), method, before, begun))
        fitting = (one for one in names if one.startswith(begun))
        return {
            "completions": [SimpleCompletion(one, type="ref") for one in islice(fitting, _MOST)],
            "suppress": bool(names),
            "matched_fragment": begun,
        }

    shell.Completer.custom_matchers.append(match)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Switch completion off: `%unload_ext holdfast.ipython`."""
    matchers = shell.Completer.custom_matchers
    matchers[:] = [one for one in matchers if getattr(one, "matcher_identifier", "") != _MATCHER]


def completions(thing: Any, method: str, before: str, begun: str) -> Iterable[str]:
    """Return the texts that a string argument of a call may have; none if nothing can be read."""
    try:
        match thing:
            case Registry():
                return list(_of_registry(thing, method, begun))
            case Run():
                return _of_run(thing, method, before)
            case Stored():
                return _of_stored(thing, method, before)
    except RegistryError:
        pass  # the call itself will raise the error
    return []


def _of_registry(reg: Registry, method: str, begun: str) -> Iterator[str]:
    if method in ("run", "diff_runs", "repack") or (
        method in ("checkpoint", "stored", "fork", "diff") and "/" not in begun
    ):
        yield from reg.run_names()
    elif method in ("checkpoint", "stored", "fork", "diff"):
        run_id = begun.partition("/")[0]
        run = RunLog(reg.handle.store, check_run_id(run_id)).open()
        yield from (f"{run_id}/{ref}" for ref in refs_of(run))


def _of_run(run: Run, method: str, before: str) -> list[str]:
    manifest = run.manifest
    if before.rstrip().endswith("phase=") or method in _OF_PHASES:
        return list(manifest.phases_saved)
    match method.split("."):
        case ["pins", ("tags" | "gates" | "artifacts") as kind, "get" | "set"]:
            return [pin.name for pin in manifest.pins_of(kind.removesuffix("s"))]
        case ["releases", "get" | "rollback"]:
            return [pin.name for pin in manifest.pins_of("release")]
        case ["streams"]:
            return [stream.name for stream in manifest.streams]
        case ["history", "plot"]:
            return list(dict.fromkeys(name for one in manifest.live() for name in one.metrics))
    return []


def _of_stored(stored: Stored, method: str, before: str) -> list[str]:
    match method:
        case "load" if "only" in before:
            return [*stored.components, *stored]
        case "lazily":
            return list(stored.components)
        case "load_into" if "component" in before:
            return list(stored.components)
        case "companion" if isinstance(stored, Checkpoint):
            return list(stored.companions)
    return []
