"""Resolve refs: `RUN/latest`, `RUN/phase2/best`, `RUN/tags/NAME`, `RUN/<hex digits>`, ...

A ref names exactly one checkpoint or fails, with near names; nothing is guessed. Specified in
docs/spec.md, section 16.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from holdfast.registry.errors import (
    AmbiguousRef,
    IntegrityError,
    InvalidInput,
    Malformed,
    NotFound,
    RegistryError,
    UnsupportedFormat,
)
from holdfast.registry.history import RunLog, phase_segment, step_ref
from holdfast.registry.history.replay import CheckpointRecord, RunManifest
from holdfast.registry.loading import Checkpoint, StateHandle, Stored, find_checkpoint
from holdfast.registry.objects import ObjectKey
from holdfast.registry.spec import Monitor
from holdfast.registry.store import Store
from holdfast.registry.values import Digest, near

_DIGEST = r"(?:sha256:)?([0-9a-f]{8,64})"
_STEP = r"step(\d{1,16})"
_VERSION = r"v\d{1,16}"
#: Runs that are opened at once in search of an id.
_AT_ONCE = 32
FORMS = (
    "RUN, RUN/latest, RUN/best, RUN/best/METRIC, RUN/PHASE/latest, RUN/PHASE/best, "
    "RUN/PHASE/stepN, RUN/gates/NAME, RUN/tags/NAME, RUN/releases/VERSION, RUN/releases/latest, "
    "RUN/artifacts/NAME, RUN/pool/vN, RUN/DIGEST, and CHECKPOINT/companions/NAME"
)


def is_digest(text: str) -> bool:
    """Return whether a segment is 8 to 64 digits of an id."""
    return re.fullmatch(_DIGEST, text) is not None


def find_in_run(store: Store, log: RunLog, path: str) -> Stored:
    """Return the stored state that the part of a ref after the run names, in the run as read."""
    run = log.run
    if run.dropped is not None:
        from holdfast.registry.history import how_to_undrop

        raise NotFound(
            "the run was dropped",
            where=f"{run.run_id}/{path}",
            found=run.dropped,
            hint=how_to_undrop(run),
        )
    segments = path.split("/") if path else ["latest"]
    match segments:
        case [*of, "companions", name] if of:
            return _checkpoint(store, log, of).companion(name)
        case ["artifacts", name]:
            from holdfast.registry.curation import find_pin

            pin = find_pin(log.refresh(), "artifact", name)
            return Stored(StateHandle(store, log, pin.manifest, pin.ref))
        case ["releases", version]:
            from holdfast.registry.curation import Releases
            from holdfast.registry.writing import Committer, StateWriter

            releases = Releases(Committer(StateWriter(store, log)))
            return releases.latest() if version == "latest" else releases.get(version)
        case ["pool", version] if re.fullmatch(_VERSION, version):
            from holdfast.registry.curation.pool import OpponentPool
            from holdfast.registry.writing import Committer, StateWriter

            return OpponentPool(Committer(StateWriter(store, log))).entry(int(version[1:]))
    return _checkpoint(store, log, segments)


def refs_of(manifest: RunManifest) -> list[str]:
    """Return the refs that `find_in_run` finds, as far as the run was read; no digits of ids."""
    if manifest.dropped is not None:
        return []
    found = _pointers(manifest, manifest.monitors, None)
    for phase in dict.fromkeys(one.phase for one in manifest.live()):
        pointers = _pointers(manifest, manifest.spec.phase(phase).monitors, phase)
        found += [f"{phase_segment(phase)}/{name}" for name in pointers]
    found += [step_ref(one) for one in manifest.live()]
    found += [pin.ref for pin in manifest.pins]
    found += ["releases/latest"] if manifest.release is not None else []
    return [*found, *(f"pool/v{entry.version:04d}" for entry in manifest.roster())]


def _pointers(run: RunManifest, monitors: Sequence[Monitor], phase: str | None) -> list[str]:
    """Return the names that point to a checkpoint of a phase, or of the run."""
    found = [f"best/{one.label}" for one in monitors if run.best(one, phase) is not None]
    if any(run.best(one, phase) is not None for one in monitors[:1]):
        found.insert(0, "best")
    return ["latest", *found] if run.latest(phase) is not None else found


def find_evicted(store: Store, log: RunLog, refs: Iterable[str]) -> list[Checkpoint]:
    """Return the evicted or thinned checkpoints that refs name, each once, in their order."""
    run, evicted = log.refresh(), log.history().evicted
    evicted = [*evicted, *(one for one in run.checkpoints if one.parts is not None)]
    found = {one.n: one for one in (_evicted(run, evicted, ref) for ref in refs)}
    return [Checkpoint(store, log, one) for one in found.values()]


def _evicted(run: RunManifest, evicted: Sequence[CheckpointRecord], ref: str) -> CheckpointRecord:
    path = ref.removeprefix(f"{run.run_id}/")
    fitting = [one for one in evicted if _fits(one, path)]
    if not fitting:
        kept = any(_fits(one, path) for one in run.live())
        number = re.search(r"\d{1,16}$", path)
        # Another step is another checkpoint, not a slip.
        names = [_name(one) for one in evicted if number and one.step == int(number[0])]
        raise NotFound(
            "no evicted checkpoint of this name",
            where=f"{run.run_id}/{path}",
            expected="PHASE/stepN or 8 and more digits of an id",
            found="a checkpoint that is kept" if kept else None,
            hint=near(path, names) or "`holdfast ls --evicted` lists them.",
        )
    if len({one.manifest for one in fitting}) > 1:
        raise AmbiguousRef(
            "several evicted checkpoints have this name",
            where=f"{run.run_id}/{path}",
            found=", ".join(one.manifest.short for one in fitting),
            hint="Name one by its id.",
        )
    return fitting[-1]


def _name(record: CheckpointRecord) -> str:
    return f"{phase_segment(record.phase)}/step{record.step}"


def _fits(checkpoint: CheckpointRecord, path: str) -> bool:
    if is_digest(path):
        return checkpoint.manifest.hex().startswith(path.removeprefix("sha256:"))
    phase, _, step = path.rpartition("/step")
    named = phase in (checkpoint.phase, phase_segment(checkpoint.phase))
    return named and step.isdigit() and int(step) == checkpoint.step


def stored_ids(store: Store, digits: str) -> set[Digest]:
    """Return the ids of all stored states that begin with these digits: one listing."""
    plain = digits.removeprefix("sha256:")
    listed = store.backend.list(f"manifests/{plain[:2]}/{plain}")
    return {ObjectKey.parse(one.key).digest for one in listed}


def find_by_id(
    store: Store,
    runs: Sequence[str],
    open_log: Callable[[str], RunLog],
    digits: str,
    stored: set[Digest],
) -> Stored:
    """Return the one checkpoint of any run whose id begins with these digits.

    Runs are opened only until all `stored` states are found, the last by name first, since names
    that Holdfast gives begin with the time.
    """
    where = f"{store.backend.url}: {digits}"

    def look(name: str) -> Stored | RegistryError:
        try:
            return find_in_run(store, open_log(name), digits)
        except AmbiguousRef:
            raise
        except (NotFound, IntegrityError, UnsupportedFormat) as error:
            return error

    found: dict[bytes, Stored] = {}
    damaged: dict[str, RegistryError] = {}
    latest = sorted(runs, reverse=True) if stored else []
    for start in range(0, len(latest), _AT_ONCE):
        some = latest[start : start + _AT_ONCE]
        for name, one in zip(some, store.pools.bulk.map(look, some), strict=True):
            if isinstance(one, Stored):
                found[one.digest] = one
            elif not isinstance(one, NotFound):
                damaged[name] = one
        if found.keys() >= stored:
            break
    if len(found) > 1:
        raise AmbiguousRef(
            "several checkpoints begin with these digits",
            where=digits,
            found=", ".join(sorted(f"{one.run_id}/{one.digest.short}" for one in found.values())),
            hint="Give more digits, or the run: RUN/DIGITS.",
        )
    if damaged and not found:
        first = next(iter(damaged.values()))
        raise Malformed(
            "no checkpoint with this id in the runs that can be read",
            where=where,
            expected=f"to read {', '.join(damaged)} too",
            found=first.summary,
            hint="Run `holdfast verify`; where the run is known, name it: RUN/DIGITS.",
        ) from first
    if not found:
        raise NotFound("no checkpoint with this id", where=where)
    return next(iter(found.values()))


def _checkpoint(store: Store, log: RunLog, segments: list[str]) -> Checkpoint:
    """Return the checkpoint that the segments of a path name."""
    return find_checkpoint(store, log, _number(log, segments))


def _number(log: RunLog, segments: list[str]) -> int:
    match segments:
        case ["gates", name]:
            from holdfast.registry.curation import find_pin

            checkpoint = find_pin(log.refresh(), "gate", name).checkpoint
            assert checkpoint is not None  # replay has every gate name one
            return checkpoint
        case ["tags", name]:
            if name not in (tags := log.run.tags):
                where = f"{log.run_id}/tags/{name}"
                raise NotFound("no such tag", where=where, hint=near(name, tags))
            return tags[name]
        case [text] if is_digest(text):
            return _by_digest(log, text)
        case ["latest" | "best", *_]:
            return _pointed(log, None, segments)
        case [phase, *rest] if rest:
            return _pointed(log, _phase(log.run, phase), rest)
    path = "/".join(segments)
    raise InvalidInput(
        "not a ref",
        where=f"{log.run_id}/{path}",
        expected=FORMS,
        hint=_step_of(log.run, path) or _near(log.run, path),
    )


def _step_of(run: RunManifest, path: str) -> str | None:
    """Return the full refs of a step that was named without its phase, or as a bare number."""
    match = re.fullmatch(r"(?:.*/)?(?:step)?(\d{1,16})", path)
    steps = [one for one in run.live() if match and one.step == int(match[1])]
    found = [f"{run.run_id}/{step_ref(one)}" for one in steps]
    return f"Did you mean {' or '.join(found)}?" if found else None


def _near(run: RunManifest, path: str) -> str | None:
    """Return the names like this one; a pin may be named without its kind."""
    names = ["latest", "best", *(f"{pin.kind}s/{pin.name}" for pin in run.pins)]
    same = [one for one in names if one.rpartition("/")[2] in (path, path.removeprefix("v"))]
    return f"Did you mean {' or '.join(map(repr, same))}?" if same else near(path, names)


def _by_digest(log: RunLog, text: str) -> int:
    run, digits = log.run, text.removeprefix("sha256:")
    kept = [one for one in run.checkpoints if one.evicted is None]
    found = {one.manifest: one for one in kept if one.manifest.hex().startswith(digits)}
    if len(found) > 1:
        raise AmbiguousRef(
            "several checkpoints begin with these digits",
            where=f"{run.run_id}/{digits}",
            found=", ".join(digest.hex()[: len(digits) + 4] for digest in found),
            hint="Give more digits.",
        )
    if not found and run.evicted_count:
        evicted = log.history().evicted
        for one in reversed(evicted):
            if one.manifest.hex().startswith(digits):
                raise NotFound(
                    "this checkpoint was evicted",
                    where=f"{run.run_id}/{digits}",
                    found=one.evicted,
                    hint="`holdfast undo` brings it back until it is collected.",
                )
    if not found:
        raise NotFound("no checkpoint with this id", where=f"{run.run_id}/{digits}")
    return next(iter(found.values())).n


def _phase(run: RunManifest, segment: str) -> str:
    phases = {*run.phases_saved}
    phases |= {phase.name for phase in run.spec.phases}
    for phase in phases:
        if segment in (phase, phase_segment(phase)):
            return phase
    known = sorted(phase_segment(phase) for phase in phases)
    raise NotFound(
        "no such phase, tag or digest",
        where=f"{run.run_id}/{segment}",
        expected=f"one of {', '.join([*known, 'latest', 'best', 'tags/NAME'])}",
        hint=near(segment, [*known, "latest", "best"]),
    )


def _pointed(log: RunLog, phase: str | None, segments: list[str]) -> int:
    run = log.run
    where = "/".join([run.run_id, *([phase_segment(phase)] if phase else []), *segments])
    match segments:
        case ["latest"]:
            found = run.latest(phase)
        case ["best"]:
            found = run.best(run.monitor(phase), phase)
        case ["best", metric]:
            known_here = run.spec.phase(phase).monitors if phase else run.monitors
            monitors = {monitor.label: monitor for monitor in known_here}
            if metric not in monitors:
                known = ", ".join(monitors) or "none"
                raise NotFound(
                    "no such monitor", where=where, expected=known, hint=near(metric, monitors)
                )
            found = run.best(monitors[metric], phase)
        case [text] if phase is not None and (step := re.fullmatch(_STEP, text)):
            return _at_step(log, phase, int(step[1]), where)
        case _:
            hint = _step_of(run, where)
            raise InvalidInput("not a ref", where=where, expected=FORMS, hint=hint)
    if found is None:
        saved = len(run.live(phase))
        why = f"{saved} checkpoints, none with the monitored metric" if saved else "no checkpoints"
        raise NotFound("there is none yet", where=where, found=why)
    return found.n


def _at_step(log: RunLog, phase: str, step: int, where: str) -> int:
    run = log.run
    for record in run.at_step(phase, step):
        return record.n
    everything = log.history().checkpoints
    saved = [one for one in everything if (one.phase, one.step) == (phase, step)]
    if saved:
        # First a checkpoint that `undo` finds by this name.
        gone = min(saved, key=lambda one: (one.superseded, -one.n))
        evicted = {one.manifest for one in saved if one.evicted is not None}
        raise _not_pointed(run, gone, where, is_alone=len(evicted) == 1)
    near_by = sorted((one.step for one in run.live(phase)), key=lambda other: abs(other - step))
    found = f"steps {', '.join(map(str, sorted(near_by[:3])))}"
    raise NotFound("no checkpoint at this step", where=where, found=found)


def _not_pointed(
    run: RunManifest, record: CheckpointRecord, where: str, *, is_alone: bool
) -> NotFound:
    """Return the error for a step that does not find its checkpoint, with the ref that does."""
    if record.evicted is None:
        return NotFound(
            "superseded: training went on from an earlier checkpoint",
            where=where,
            hint=f"{run.run_id}/{record.manifest.short} finds it.",
        )
    name = _name(record)
    if record.superseded or not is_alone:
        name = record.manifest.short
    return NotFound(
        f"evicted ({record.evicted})",
        where=where,
        hint=f"`holdfast undo {run.run_id} {name}` brings it back until it is collected.",
    )
