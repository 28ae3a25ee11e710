"""The last verification of a registry on this machine, kept beside the heads that were seen.

Damage stays known until a verification that looks for it does not find it: one that reads less
says nothing of it.

It is a convenience for people: nothing depends on it, and it proves nothing. Where heads are not
remembered, neither is this.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from holdfast.backends.escape import printable, shortened
from holdfast.registry.errors import RegistryError
from holdfast.registry.history import kept_ref
from holdfast.registry.history.replay import CheckpointRecord
from holdfast.registry.objects import join_lines, split_lines
from holdfast.registry.store import Store
from holdfast.registry.upkeep.findings import Finding, Needs, VerifyReport
from holdfast.registry.values import Field, Record, empty

_LOGGER = logging.getLogger("holdfast")
#: Findings that are kept, characters of each of their texts, and refs that each affects.
_KEPT, _LONGEST, _REFS = 100, 500, 1000
_SUFFIX = ".verified"

#: What was read: names and sizes, a share of the packs, every byte, or every chunk decoded too.
Depth = Literal["structure", "sample", "deep", "decode"]
_Count = Annotated[int, Field(ge=0)]


class KeptFinding(Record):
    """A finding of the last verification, shortened."""

    kind: str
    where: str
    message: str
    advice: str
    severity: Literal["error", "note"]
    affects: tuple[str, ...] = ()
    needs: Needs = "structure"


class LastVerify(Record):
    """The last verification of a registry."""

    format: Literal["holdfast.verified/1"] = "holdfast.verified/1"
    registry: str
    time_ms: int  # when it ended, by this machine's clock
    depth: Depth  # how much it read
    runs: _Count
    checkpoints: _Count
    objects: _Count
    bytes_checked: _Count  # bytes that were read and hashed
    errors: _Count
    notes: _Count
    findings: tuple[KeptFinding, ...] = ()  # the first of them, errors first
    #: Errors that earlier verifications found, and that no later one has looked for.
    standing: tuple[KeptFinding, ...] = ()
    depths: dict[Depth, int] = empty()  # when a verification of each depth ended last

    @property
    def damage(self) -> tuple[KeptFinding, ...]:
        """The errors that are known, whichever verification found them."""
        return (*(one for one in self.findings if one.severity == "error"), *self.standing)


def note_verify(store: Store, report: VerifyReport) -> None:
    """Keep the result of a verification on this machine; a failure to write is no error."""
    if store.heads is None:
        return
    errors = [one for one in report.findings if one.severity == "error"]
    notes = [one for one in report.findings if one.severity != "error"]
    before, time_ms, depth = last_verify(store), int(time.time() * 1000), _depth(report)
    found = LastVerify(
        registry=store.config.id,
        time_ms=time_ms,
        depth=depth,
        runs=report.runs,
        checkpoints=report.checkpoints,
        objects=report.objects,
        bytes_checked=report.bytes_checked,
        errors=len(errors),
        notes=len(notes),
        findings=tuple(map(_shortened, [*errors, *notes][:_KEPT])),
        standing=tuple(map(_shortened, report.standing[:_KEPT])),
        depths={**(before.depths if before else {}), depth: time_ms},
    )
    store.heads.keep(_SUFFIX, join_lines([found.encode()]))


def last_verify(store: Store) -> LastVerify | None:
    """Return the last verification of this registry on this machine; `None` if there is none."""
    data = None if store.heads is None else store.heads.kept(_SUFFIX)
    if data is None:
        return None
    try:
        (line, *_) = split_lines(data, where=_SUFFIX)
        found = LastVerify.parse(line, where=_SUFFIX)
    except RegistryError as error:
        _LOGGER.debug("the last verification of %s cannot be read: %s", store.backend.url, error)
        return None
    return found if found.registry == store.config.id else None


def known_damage(store: Store) -> list[Finding]:
    """Return the errors that verifications on this machine found, and none since found gone."""
    last = last_verify(store)
    return [Finding(**one.shared(KeptFinding)) for one in (last.damage if last else ())]


@dataclass(frozen=True, slots=True)
class Damage:
    """The refs that known damage affects, by run."""

    refs: Mapping[str, Sequence[str]]  # the refs within each run
    names: Mapping[str, Collection[str]]  # the same refs, with all names of which they are parts

    @classmethod
    def of(cls, store: Store) -> Damage:
        """Return the damage that this machine knows of; reads a local file."""
        found: dict[str, dict[str, None]] = {}
        for ref in (ref for one in known_damage(store) for ref in one.affects):
            run_id, _, within = ref.partition(" ")[0].partition("/")
            found.setdefault(run_id, {})[within] = None
        names = {
            run_id: {part for one in refs for part in _parts(one)} for run_id, refs in found.items()
        }
        return cls({run_id: list(refs) for run_id, refs in found.items()}, names)

    def in_run(self, run_id: str) -> Sequence[str]:
        """Return the refs of a run that are affected, without the run's name."""
        return self.refs.get(run_id, ())

    def marks(self, run_id: str, record: CheckpointRecord) -> list[str]:
        """Return `damaged` as a mark of a checkpoint, if it or its companions are affected."""
        return ["damaged"] if kept_ref(record) in self.names.get(run_id, ()) else []


def _parts(ref: str) -> Iterator[str]:
    names = ref.split("/")
    return ("/".join(names[:end]) for end in range(1, len(names) + 1))


def _depth(report: VerifyReport) -> Depth:
    data = report.data
    if data is None:
        return "structure"
    if data.packs_read + data.packs_noted < data.packs:
        return "sample"
    return "deep" if data.chunks_decoded is None else "decode"


def _shortened(finding: Finding) -> KeptFinding:
    texts = (finding.kind, finding.where, finding.message, finding.advice)
    kind, where, message, advice = (shortened(printable(text), _LONGEST) for text in texts)
    return KeptFinding(
        kind=kind,
        where=where,
        message=message,
        advice=advice,
        severity=finding.severity,
        affects=finding.affects[:_REFS],
        needs=finding.needs,
    )
