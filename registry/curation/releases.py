"""Releases: inference-only states under semantic versions, each with a model card, immutable.

A release is a pin, so its checkpoint may be evicted. It needs no chunks but those of the
checkpoint. The card is a stored state too.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from holdfast.backends.escape import quoted
from holdfast.registry import pytree
from holdfast.registry.curation.cards import check_card, read_card, write_card
from holdfast.registry.curation.pins import check_whole, find_pin, own, sound
from holdfast.registry.errors import Conflict, InvalidInput, NotFound
from holdfast.registry.history import RunLog, check_metrics, format_time, is_text, moment
from holdfast.registry.history.actions import Action, CommitKeys, PointRelease, SetPin
from holdfast.registry.history.replay import CheckpointRecord, Pin, RunManifest
from holdfast.registry.loading import Checkpoint, StateHandle, Stored, check_components
from holdfast.registry.objects import thinned
from holdfast.registry.pytree import FlatState
from holdfast.registry.spec import inference_parts
from holdfast.registry.store import Store
from holdfast.registry.values import Digest, float_to_hex, markup, release_version
from holdfast.registry.writing import Committer, NewCommit, StateWriter, Written

#: A card: a mapping, or the path of a YAML file.
Card = Mapping[str, Any] | str | os.PathLike[str]
_CARD = "card"


class _ReleaseHandle(StateHandle):
    """A release: a stored state with its pin."""

    def __init__(self, store: Store, log: RunLog, pin: Pin) -> None:
        super().__init__(store, log, pin.manifest, pin.ref)
        self.pin = pin

    def commit_keys(self) -> CommitKeys | None:
        """Return the keys of the checkpoint's commit, if the release is the whole checkpoint."""
        record = self.source()
        is_whole = record is not None and record.manifest == self.digest
        return record.commit_keys if record is not None and is_whole else None

    def file_keys(self) -> dict[str, Any]:
        """Return version, metrics and card under the keys that the preset names."""
        keys = self.log.run.spec.release_keys
        if keys is None:
            return {}
        found: dict[str, Any] = {}
        if keys.version is not None:
            found[keys.version] = self.pin.name
        if keys.metrics is not None:
            found[keys.metrics] = dict(self.pin.metrics)
        if keys.card is not None:
            found[keys.card] = self.card()
        return found

    def card(self) -> dict[str, Any]:
        """Read the model card."""
        if self.pin.card is None:
            return {}
        card = StateHandle(self.store, self.log, self.pin.card, f"{self.path}/{_CARD}")
        return dict(card.load()[_CARD])

    def source(self) -> CheckpointRecord | None:
        """Return the record of its checkpoint; `None` if the log does not know it."""
        n = self.pin.checkpoint
        return None if n is None else self.log.knowing(n).by_n.get(n)


class Release(Stored):
    """A published state."""

    _handle: _ReleaseHandle

    def __init__(self, store: Store, log: RunLog, pin: Pin) -> None:
        super().__init__(_ReleaseHandle(store, log, pin))

    @property
    def record(self) -> Pin:
        """The record in the run's log."""
        return self._handle.pin

    @property
    def version(self) -> str:
        """Its semantic version."""
        return self._handle.pin.name

    @property
    def metrics(self) -> dict[str, float]:
        """Its metrics."""
        return dict(self._handle.pin.metrics)

    @property
    def published(self) -> datetime:
        """When it was published, by the publisher's clock; limited to the years 1 to 9999."""
        return moment(self._handle.pin.time_ms)

    @property
    def is_latest(self) -> bool:
        """Whether `releases/latest` names it, by the part of the log that this handle has read."""
        return self._handle.log.run.release == self.version

    @property
    def checkpoint(self) -> int | None:
        """Commit number of its checkpoint, which may be evicted."""
        return self._handle.pin.checkpoint

    @property
    def source(self) -> str | None:
        """Ref of its checkpoint."""
        checkpoint = self.source_checkpoint()
        return None if checkpoint is None else checkpoint.ref

    def source_checkpoint(self) -> Checkpoint | None:
        """Return its checkpoint, which may be evicted; `None` if the log does not know it."""
        record = self._handle.source()
        if record is None:
            return None
        return Checkpoint(self._handle.store, self._handle.log, record)

    @property
    def card(self) -> dict[str, Any]:
        """Its model card, read and verified at each call; empty where it has none.

        Raises:
            IntegrityError: The card is damaged or gone.
        """
        return self._handle.card()

    def card_yaml(self) -> str:
        """Return its model card as YAML: block style, keys sorted."""
        return write_card(self.card)


@dataclass(frozen=True, slots=True)
class ReleaseEvent:
    """A step in the history of a run's releases."""

    n: int  # number of the commit
    #: `published`, or `pointed`: an older release was made the latest again.
    event: Literal["published", "pointed"]
    version: str  # the release that became the latest
    author: str  # the author, as `user@host`
    time: datetime  # the time by the author's clock
    reason: str = ""  # the reason; only of `pointed`


class Releases:
    """The releases of a run: publish, find and roll back."""

    def __init__(self, committer: Committer) -> None:
        self._committer = committer
        self._log = committer.log

    def __repr__(self) -> str:
        run = self._log.run
        return f"<Releases {run.run_id}: {len(run.pins_of('release'))}, latest {run.release}>"

    def _repr_html_(self) -> str:
        return markup.safely("Releases", self._html)

    def _html(self) -> str:
        run = self._log.run
        pins = run.pins_of("release")[::-1]
        rows = [
            (one.name, format_time(one.time_ms), one.manifest.short, one.metrics) for one in pins
        ]
        table = markup.Rows(("version", "published", "id", "metrics"), rows, len(rows), "releases")
        return markup.describe("Releases", run.run_id, {"latest": run.release}, table)

    def publish(
        self,
        version: str,
        checkpoint: Checkpoint,
        *,
        card: Card | None = None,
        metrics: Mapping[str, object] | None = None,
        only: str | Iterable[str] | None = None,
        state: object = None,
    ) -> Release:
        """Publish a checkpoint, or its parts for inference, under a semantic version for ever.

        No chunk is stored again, and no writer token is needed. The release becomes
        `releases/latest` even if its version is lower than others: a patch of an older line is the
        newest release. Publishing the same again changes nothing.

        Args:
            version: `MAJOR.MINOR.PATCH`, optionally with a pre-release (`2.0.0-rc.1`), without
                build metadata.
            checkpoint: A checkpoint of this run.
            card: The model card: a mapping, or the path of a YAML file. It must have the fields
                that the run's preset requires.
            metrics: Metrics of the release; by default the checkpoint's.
            only: The components to publish; without it those that the preset names for inference,
                and the whole state where it names none.
            state: A state to publish instead, such as converted weights; the checkpoint is then
                only its source.

        Raises:
            InvalidInput: The version, the card or the metrics are not valid, the card lacks fields,
                the checkpoint belongs to another run, or `only` and `state` are both given.
            NotFound: The checkpoint has no component of a name in `only`.
            IncompatibleState: It has none of the components that the preset names for inference.
            Conflict: The version exists with other content, or the checkpoint was evicted.
        """
        name, run = str(release_version(version)), self._log.refresh()
        own(self._committer, checkpoint, f"a release ({name})")
        fields = {} if card is None else read_card(card)
        check_card(fields, run.spec.card_fields)
        values = None if metrics is None else check_metrics(metrics)
        wanted = _Publication(self._committer.writer, name, checkpoint, fields, values)
        if state is not None and only is not None:
            raise InvalidInput("`only` and `state` exclude each other", where=wanted.where)
        if state is not None:
            wanted.state = pytree.flatten(state)
            pytree.await_devices(wanted.state)
        else:
            wanted.parts = _parts(checkpoint, self._log.run, only)
        now = self._committer.commit(wanted)
        return self._release(find_pin(now, "release", wanted.name))

    def get(self, version: str) -> Release:
        """Return a release.

        Raises:
            NotFound: There is none of this version; the error suggests similar ones.
        """
        return self._release(find_pin(self._log.refresh(), "release", version))

    def latest(self) -> Release:
        """Return the release of `releases/latest`: the last one published or rolled back to.

        Raises:
            NotFound: Nothing has been released.
        """
        run = self._log.refresh()
        if run.release is None:
            raise NotFound("nothing has been released yet", where=f"{run.run_id}/releases/latest")
        return self._release(find_pin(run, "release", run.release))

    def list(self) -> list[Release]:
        """Return every release as of now, in the order of publication."""
        return [self._release(pin) for pin in self._log.refresh().pins_of("release")]

    def rollback(self, version: str, reason: str = "") -> Release:
        """Make a published release the latest again; nothing else changes.

        Args:
            version: The version of the release.
            reason: The reason, for readers of the history.

        Raises:
            NotFound: There is no such release.
            InvalidInput: The reason is not text.
            Conflict: The run was dropped.
        """
        if not isinstance(reason, str) or not is_text(reason):
            raise InvalidInput("a reason is not text", found=quoted(reason))
        find_pin(self._log.refresh(), "release", version)

        def compose(run: RunManifest) -> Sequence[Action] | None:
            is_news = run.release != version
            return [PointRelease(version=version, reason=reason)] if is_news else None

        return self._release(find_pin(self._committer.commit(compose), "release", version))

    def history(self) -> Iterator[ReleaseEvent]:
        """Yield every publication and rollback, oldest first, as of now."""
        for commit in self._log.commits():
            time = moment(commit.time_ms)
            for action in commit.actions:
                match action:
                    case SetPin(kind="release", name=name):
                        yield ReleaseEvent(commit.n, "published", name, commit.author, time)
                    case PointRelease(version=name, reason=why):
                        yield ReleaseEvent(commit.n, "pointed", name, commit.author, time, why)

    def _release(self, pin: Pin) -> Release:
        return Release(self._committer.store, self._log, pin)


@dataclass(slots=True)
class _Publication(NewCommit):
    """The commit of a release."""

    writer: StateWriter  # puts the states of the run
    name: str  # the version
    checkpoint: Checkpoint  # the source
    card: dict[str, Any]  # the card; none where empty
    metrics: dict[str, float] | None
    parts: list[str] | None = None  # the components to publish; the whole checkpoint where `None`
    state: FlatState | None = None  # the state to publish instead of them
    digest: Digest | None = None  # id of the published state, once it is on the store
    card_digest: Digest | None = None  # id of the card

    @property
    def where(self) -> str:
        return f"{self.checkpoint.run_id}/releases/{self.name}"

    def write_states(self) -> Sequence[Written]:
        """Put the manifest of the release and the card on the store."""
        written, of = [], self.checkpoint.digest
        self.digest = of
        if self.state is not None:
            written.append(self.writer.write(self.state, self.writer.choose_bases([of])))
        elif self.parts is not None:
            written.append(self.writer.cut(of, self.parts))
        else:
            held = self.writer.verified(of).placement.components
            if held is not None:
                raise thinned(held, self.checkpoint.ref)
        if written:
            self.digest = written[0].state.manifest.digest
        if self.card:
            # Sorted, so that cards which differ only in the order of keys have one id.
            written.append(self.writer.write_plain({_CARD: _sorted(self.card)}))
            self.card_digest = written[-1].state.manifest.digest
        return written

    def actions(self, run: RunManifest) -> Sequence[Action] | None:
        """Return the pin; `None` where the same release exists already."""
        existing = run.pin("release", self.name)
        if existing is not None:
            self._check_same(existing)
            return None
        record = sound(run, self.checkpoint.handle.n, self.checkpoint.ref)
        if self.state is None and self.parts is None:
            check_whole(self.writer.log, record, self.checkpoint.ref)
        assert self.digest is not None  # the states are written
        return [
            SetPin(
                kind="release",
                name=self.name,
                manifest=self.digest,
                checkpoint=record.n,
                metrics=record.metrics if self.metrics is None else self.metrics,
                card=self.card_digest,
            )
        ]

    def _check_same(self, existing: Pin) -> None:
        others = {
            "other content": existing.manifest != self.digest,
            "another card": existing.card != self.card_digest,
            "other metrics": self.metrics is not None
            and _bits(self.metrics) != _bits(existing.metrics),
        }
        differing = [name for name, differs in others.items() if differs]
        if differing:
            raise Conflict(
                "this version is published already",
                where=self.where,
                expected=f"{existing.manifest.short}, as it was published",
                found=" and ".join(differing),
                hint="A release never changes: publish another version.",
            )


def _parts(
    checkpoint: Checkpoint, run: RunManifest, only: str | Iterable[str] | None
) -> list[str] | None:
    """Return the components of a release; `None` for the whole checkpoint."""
    known = checkpoint.manifest.components
    if only is not None:
        chosen = [only] if isinstance(only, str) else list(only)
        check_components(checkpoint.ref, chosen, known)
        if not chosen:
            raise InvalidInput("a release needs components", where=checkpoint.ref)
    else:
        chosen = inference_parts(run.spec, known, where=checkpoint.ref)
    return None if chosen in ([], list(known)) else chosen


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(item) for item in value] if isinstance(value, list) else value


def _bits(metrics: Mapping[str, float]) -> dict[str, str]:
    return {name: float_to_hex(value) for name, value in metrics.items()}  # NaN equals NaN here
