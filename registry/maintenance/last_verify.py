"""The last verification of a registry on this machine, kept beside the heads that were seen.

It is a convenience for people: nothing depends on it, and it proves nothing. Where heads are not
remembered, neither is this.
"""

from __future__ import annotations

import logging
import time
from typing import Annotated, Literal

from pydantic import Field

from holdfast.backends.escape import printable, shortened
from holdfast.registry.errors import RegistryError
from holdfast.registry.maintenance.findings import Finding, VerifyReport
from holdfast.registry.storage.framing import join_lines, split_lines
from holdfast.registry.storage.store import Store
from holdfast.registry.values.records import Record

_LOGGER = logging.getLogger("holdfast")
#: Findings that are kept, and characters of each of their texts.
_KEPT, _LONGEST = 100, 500
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


class LastVerify(Record):
    """The last verification of a registry.

    Attributes:
        registry: The registry's id.
        time_ms: When it ended, by this machine's clock.
        depth: How much it read.
        runs: Number of runs.
        checkpoints: Number of checkpoints.
        objects: Number of objects.
        bytes_checked: Bytes that were read and hashed.
        errors: Number of errors.
        notes: Number of notes.
        findings: The first of them, errors first.
    """

    format: Literal["holdfast.verified/1"] = "holdfast.verified/1"
    registry: str
    time_ms: int
    depth: Depth
    runs: _Count
    checkpoints: _Count
    objects: _Count
    bytes_checked: _Count
    errors: _Count
    notes: _Count
    findings: tuple[KeptFinding, ...] = ()


def note_verify(store: Store, report: VerifyReport) -> None:
    """Keep the result of a verification on this machine; a failure to write is no error."""
    if store.heads is None:
        return
    errors = [one for one in report.findings if one.severity == "error"]
    notes = [one for one in report.findings if one.severity != "error"]
    found = LastVerify(
        registry=store.config.id,
        time_ms=int(time.time() * 1000),
        depth=_depth(report),
        runs=report.runs,
        checkpoints=report.checkpoints,
        objects=report.objects,
        bytes_checked=report.bytes_checked,
        errors=len(errors),
        notes=len(notes),
        findings=tuple(map(_shortened, [*errors, *notes][:_KEPT])),
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
        kind=kind, where=where, message=message, advice=advice, severity=finding.severity
    )
