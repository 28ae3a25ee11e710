"""Gates, artifacts and tags: names that keep stored states.

All of them are pins. A gate is the checkpoint at the end of a phase: it never changes, and can only
be replaced when it is damaged. An artifact is any state, added once. A tag can move.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar

from holdfast.registry.errors import (
    BeyondLimit,
    Conflict,
    Hint,
    IntegrityError,
    InvalidInput,
    NotFound,
    Thinned,
)
from holdfast.registry.history import RunLog, check_name, describe_thinning, is_text, moment
from holdfast.registry.history.actions import Action, RemoveTag, SetPin, SetTag
from holdfast.registry.history.replay import CheckpointRecord, Pin, RunManifest
from holdfast.registry.loading import Checkpoint, StateHandle, Stored, find_checkpoint
from holdfast.registry.values import Digest, near
from holdfast.registry.writing import Committer, Composed


@dataclass(frozen=True, slots=True)
class PinEvent:
    """A step in the history of a run's tags, gates or artifacts: a name was set."""

    n: int  # number of the commit
    name: str
    digest: Digest  # id of the state that it names from then on
    #: Commit number of the checkpoint; `None` for an artifact.
    checkpoint: int | None
    author: str  # the author, as `user@host`
    time: datetime  # the time by the author's clock


class _Names:
    """The names of one kind in a run."""

    _kind: ClassVar[str]

    def __init__(self, committer: Committer) -> None:
        self._committer = committer
        self._log = committer.log

    def history(self) -> Iterator[PinEvent]:
        """Yield each commit that set a name, oldest first, as of now.

        This reads the log from its beginning.
        """
        self._log.refresh()
        run = self._log.history()
        for commit in self._log.commits():
            for action in commit.actions:
                found = self._named(run, action)
                if found is not None:
                    yield PinEvent(commit.n, *found, commit.author, moment(commit.time_ms))

    def _named(self, run: RunManifest, action: Action) -> tuple[str, Digest, int | None] | None:
        if isinstance(action, SetPin) and action.kind == self._kind:
            return action.name, action.manifest, action.checkpoint
        if isinstance(action, SetTag) and self._kind == "tag":
            return action.name, run.by_n[action.checkpoint].manifest, action.checkpoint
        return None

    def _pin(self, name: str) -> Pin:
        return find_pin(self._log.refresh(), self._kind, name)

    def _pins(self) -> tuple[Pin, ...]:
        return tuple(self._log.refresh().pins_of(self._kind))


class _OfCheckpoints(_Names):
    """The names of one kind that name checkpoints."""

    def get(self, name: str) -> Checkpoint:
        """Return the checkpoint that has a name now. If it is damaged, no other is loaded.

        Raises:
            NotFound: There is no such name; near names are suggested.
        """
        return self._checkpoint(self._pin(name))

    def list(self) -> dict[str, Checkpoint]:
        """Return the named checkpoints as of now, by name."""
        return {pin.name: self._checkpoint(pin) for pin in self._pins()}

    def _checkpoint(self, pin: Pin) -> Checkpoint:
        assert pin.checkpoint is not None  # replay has every tag and gate name one
        return find_checkpoint(self._committer.store, self._log, pin.checkpoint)


class Tags(_OfCheckpoints):
    """Tags: names that move from one checkpoint of the run to another; retention keeps it."""

    _kind = "tag"

    def set(self, name: str, checkpoint: Checkpoint, *, thinned: bool = False) -> None:
        """Point a tag at a checkpoint of this run; `RUN/tags/NAME` finds it.

        Args:
            name: The tag.
            checkpoint: The checkpoint.
            thinned: Whether a thinned checkpoint will do; the tag keeps what it has.

        Raises:
            InvalidInput: The checkpoint is another run's, or the name is not legal.
            Conflict: The checkpoint was evicted.
            Thinned: The checkpoint was thinned.
        """
        n = own(self._committer, checkpoint, f"a tag ({name})")
        check_name(name, "a tag")

        def compose(run: RunManifest) -> Sequence[Action]:
            record = kept(run, n, checkpoint.ref)
            if not thinned:
                check_whole(self._log, record, checkpoint.ref)
            return [SetTag(name=name, checkpoint=n)]

        self._committer.commit(compose)

    def remove(self, name: str) -> None:
        """Remove a tag. Retention may evict its checkpoint then; `history` still has its events.

        Raises:
            NotFound: There is no such tag; near names are suggested.
        """

        def compose(run: RunManifest) -> Sequence[Action]:
            return [RemoveTag(name=find_pin(run, self._kind, name).name)]

        self._committer.commit(compose)


class Gates(_OfCheckpoints):
    """Gates: checkpoints at the ends of phases, never evicted.

    A gate is set once. Only a gate that fails verification may be replaced.
    """

    _kind = "gate"

    def set(
        self, name: str, checkpoint: Checkpoint | None = None, *, thinned: bool = False
    ) -> Checkpoint:
        """Make a checkpoint a gate; `RUN/gates/NAME` finds it.

        Args:
            name: The gate's name; one of the preset's, if it declares gates.
            checkpoint: The checkpoint. Default: the best one of the gate's phase.
            thinned: Whether a thinned checkpoint will do; the gate keeps what it has.

        Raises:
            Thinned: The checkpoint was thinned.
            Conflict: The gate is set to another checkpoint, and that one is sound.
            InvalidInput: The preset declares gates and not this one, or the checkpoint is another
                run's or not of the gate's phase.
            NotFound: No checkpoint is given, and the phase has no best one.
        """
        check_name(name, "a gate")
        if checkpoint is None:
            self._committer.await_earlier()  # the best one may be among those saves
        run = self._log.refresh()
        record = self._chosen(run, name, checkpoint)
        existing = run.pin("gate", name)
        replaces = None
        if existing is not None and existing.manifest != record.manifest:
            replaces = _damaged(self._committer, existing)

        def compose(run: RunManifest) -> Sequence[Action] | None:
            now = run.pin("gate", name)
            if now is not None and now.manifest == record.manifest:
                return None
            if (now and now.manifest) != replaces:
                raise _taken(run, name, now)
            ref = f"{run.run_id}/{record.manifest.short}"
            chosen = sound(run, record.n, ref)
            if not thinned:
                check_whole(self._log, chosen, ref)
            return [
                SetPin(
                    kind="gate",
                    name=name,
                    manifest=record.manifest,
                    checkpoint=record.n,
                    metrics=record.metrics,
                    replaces=replaces,
                )
            ]

        now = self._committer.commit(compose)
        return self._checkpoint(find_pin(now, "gate", name))

    def _chosen(
        self, run: RunManifest, name: str, checkpoint: Checkpoint | None
    ) -> CheckpointRecord:
        """Return the record of the given checkpoint, or of the best one of the gate's phase."""
        phase = _gate_phase(run, name)
        record = (
            _best(run, name, phase) if checkpoint is None else checkpoint.handle.newest_record()
        )
        if checkpoint is not None:
            own(self._committer, checkpoint, f"a gate ({name})")
        if phase is not None and record.phase != phase:
            raise InvalidInput(
                f"this gate belongs to phase {phase}",
                where=f"{run.run_id}/gates/{name}",
                found=f"a checkpoint of phase {record.phase}",
            )
        return record


class Artifacts(_Names):
    """Artifacts: states of their own that the run keeps for ever, such as a tokenizer."""

    _kind = "artifact"

    def set(self, name: str, state: object) -> Stored:
        """Save a state as an artifact; `RUN/artifacts/NAME` finds it.

        Args:
            name: Given once; setting the same state again changes nothing.
            state: As for `Run.save`.

        Raises:
            Conflict: The name holds another state.
            UnsupportedValue: Something in the state cannot be stored.
        """
        check_name(name, "an artifact")
        self._log.refresh()
        written = self._committer.writer.write_plain(state)
        digest = written.state.manifest.digest

        def compose(run: RunManifest) -> Sequence[Action] | None:
            existing = run.pin("artifact", name)
            if existing is not None and existing.manifest != digest:
                raise Conflict(
                    "an artifact of this name exists, with other content",
                    where=f"{run.run_id}/artifacts/{name}",
                    expected=existing.manifest.short,
                    found=digest.short,
                    hint="Artifacts are added once; choose another name.",
                )
            return None if existing else [SetPin(kind="artifact", name=name, manifest=digest)]

        first = [written]
        self._committer.commit(
            Composed(
                compose,
                lambda: [first.pop() if first else self._committer.writer.write_plain(state)],
            )
        )
        return self._stored(digest, f"artifacts/{name}")

    def get(self, name: str) -> Stored:
        """Return an artifact.

        Raises:
            NotFound: There is none of this name.
        """
        pin = self._pin(name)
        return self._stored(pin.manifest, pin.ref)

    def list(self) -> dict[str, Stored]:
        """Return all artifacts as of now, by name, oldest first."""
        return {pin.name: self._stored(pin.manifest, pin.ref) for pin in self._pins()}

    def _stored(self, digest: Digest, path: str) -> Stored:
        return Stored(StateHandle(self._committer.store, self._log, digest, path))


class Pins:
    """Names that keep stored states of a run, each kind with `set`, `get`, `list` and `history`.

    Attributes:
        tags: Names that move between checkpoints.
        gates: Checkpoints at the ends of phases, never evicted and set once.
        artifacts: States of their own that the run keeps for ever.
    """

    def __init__(self, committer: Committer) -> None:
        self.tags = Tags(committer)
        self.gates = Gates(committer)
        self.artifacts = Artifacts(committer)


def find_pin(run: RunManifest, kind: str, name: str) -> Pin:
    """Return a pin."""
    pin = run.pin(kind, name)
    if pin is None:
        known = [one.name for one in run.pins_of(kind)]
        raise NotFound(
            f"no such {kind}", where=f"{run.run_id}/{kind}s/{name}", hint=near(name, known)
        )
    return pin


def own(committer: Committer, checkpoint: Checkpoint, what: str) -> int:
    """Return the commit number of a checkpoint of this run."""
    run = committer.log.run
    if isinstance(checkpoint, Checkpoint) and checkpoint.run_id == run.run_id:
        n = checkpoint.handle.n
        if n not in run.by_n and not run.is_evicted(n):
            committer.log.refresh()
        run = committer.log.knowing(n)
        # Another registry may have another run of this name.
        if n in run.by_n and run.by_n[n].manifest == checkpoint.digest:
            return n
    raise InvalidInput(
        f"{what} takes checkpoints of its own run",
        where=run.run_id,
        found=checkpoint.ref if isinstance(checkpoint, Stored) else repr(checkpoint),
        hint=None
        if isinstance(checkpoint, Stored)
        else Hint("Pass a checkpoint, such as reg.checkpoint(REF)."),
    )


def check_reason(committer: Committer, reason: str, act: str) -> None:
    """Refuse a reason that is empty or cannot be stored."""
    where = committer.log.run_id
    if not isinstance(reason, str) or not reason.strip():
        raise InvalidInput(f"{act} needs a reason", where=where)
    if not is_text(reason):
        raise InvalidInput("the reason is not valid Unicode", where=where, found=ascii(reason))


def kept(run: RunManifest, n: int, where: str) -> CheckpointRecord:
    """Return a checkpoint that is not evicted."""
    record = run.record(n)
    if record.evicted is not None:
        raise Conflict(
            "this checkpoint was evicted",
            where=where,
            found=record.evicted,
            hint="`holdfast undo` brings an evicted checkpoint back until it is collected.",
        )
    return record


def check_whole(log: RunLog, record: CheckpointRecord, where: str) -> None:
    """Refuse a thinned checkpoint where the whole of it is wanted."""
    if record.parts is None:
        return
    raise Thinned(
        "this checkpoint was thinned, and a name is for a whole one",
        where=where,
        expected="all its components",
        found=describe_thinning(log, record.manifest) or f"only {', '.join(record.parts)}",
        hint=Hint(
            "Bring it back with `run.retention.undo(checkpoint)`, or pass `thinned=True` to name "
            "what is there.",
            "Bring it back with `holdfast undo`, or pass `--thinned` to name what is there.",
        ),
    )


def sound(run: RunManifest, n: int, where: str) -> CheckpointRecord:
    """Return a checkpoint that is not evicted and whose weights are finite."""
    record = kept(run, n, where)
    if record.held_back:
        raise InvalidInput(
            "its weights hold NaN or infinity",
            where=where,
            found=", ".join(record.nonfinite),
            hint=Hint(
                "Save it with allow_nonfinite=True if you want it anyway.",
                "Choose another checkpoint.",
            ),
        )
    return record


def _gate_phase(run: RunManifest, name: str) -> str | None:
    declared = {gate.name: gate.phase for gate in run.spec.gates}
    if declared and name not in declared:
        raise InvalidInput(
            "the run has no such gate",
            where=f"{run.run_id}/gates/{name}",
            expected=", ".join(declared),
            hint=near(name, declared) or "The run's preset declares the gates.",
        )
    return declared.get(name)


def _best(run: RunManifest, name: str, phase: str | None) -> CheckpointRecord:
    monitors = run.spec.phase(phase or run.phase or "").monitors
    for monitor in monitors[:1]:
        found = run.best(monitor, phase)
        if found is not None:
            return found
    raise NotFound(
        "no checkpoint was given for the gate, and its phase has no best one",
        where=f"{run.run_id}/gates/{name}",
        expected=f"the metric {monitors[0].metric}" if monitors else "a monitor",
    )


def _damaged(committer: Committer, gate: Pin) -> Digest:
    """Return the id of a gate that fails verification."""
    stored = StateHandle(committer.store, committer.log, gate.manifest, gate.ref)
    try:
        stored.load()
    except BeyondLimit:
        raise  # the gate may be undamaged
    except IntegrityError:
        return gate.manifest
    raise _taken(committer.log.run, gate.name, gate)


def _taken(run: RunManifest, name: str, gate: Pin | None) -> Conflict:
    return Conflict(
        "a gate is set once",
        where=f"{run.run_id}/gates/{name}",
        found=f"{gate.manifest.short}, which is sound" if gate else "nothing",
        hint="Only a gate that fails verification may be replaced.",
    )
