"""The findings of a verification, and the report that holds them.

Plain values that never read the store. `holdfast.registry.upkeep.verifying` makes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from holdfast.registry.history.actions import Place
from holdfast.registry.objects import ObjectKey
from holdfast.registry.values import Digest, DigestField, Record, markup, size

Severity = Literal["error", "note"]
#: The least that a check has to read to find something: names and sizes, the bytes, or the chunks
#: as they are decoded.
Needs = Literal["structure", "deep", "decode"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong in a registry."""

    #: `config`, `log`, `head`, `epoch`, `manifest`, `placement`, `pack`, `missing`, `snapshot`,
    #: `unknown-file`, `link`, `notes`, `signature` or `resume`.
    kind: str
    where: str  # the key, run or file concerned
    message: str
    #: Refs of checkpoints, gates, releases, entries of the pool and streams that may not load
    #: because of it. For a damaged pack these are all that have data in it, even if they do not
    #: need the damaged chunk.
    affects: tuple[str, ...] = ()
    advice: str = ""  # what to do
    severity: Severity = "error"  # A `note` does no harm: a cache, an orphan, a foreign file
    needs: Needs = "structure"  # what a check has to read to find it


class Need(Record):
    """A state that a run holds."""

    run_id: str
    manifest: DigestField  # the state
    place: Place | None = None  # its place by the run's log; `None` where the log gives none
    parts: tuple[str, ...] | None = None  # the components that the run holds; `None` for all
    refs: tuple[str, ...]  # refs of the checkpoints, pins and others that need it


@dataclass(slots=True)
class Listed:
    """The slots of a run by a listing: those that were read before, and further ones."""

    slots: int = 0
    size_bytes: int = 0  # of all of them
    modified_ms: int = 0  # the newest time of one of them
    further: int = 0  # number of the others


@dataclass(frozen=True, slots=True)
class DataRead:
    """How much of the data a verification read."""

    packs: int  # packs that were there when it began
    packs_read: int  # packs that it read and hashed
    packs_noted: int  # packs that were read earlier in this pass, by the file given as `resume`
    pack_bytes: int
    bytes_read: int
    bytes_noted: int
    #: Encoded chunks that were decoded and are right; `None` where decoding was not asked for.
    chunks_decoded: int | None = None
    packs_archived: int = 0  # packs in an archive, which it could not read


@dataclass(frozen=True, slots=True)
class Vouched:
    """How far a trusted key vouches for a run: for these commits of its log, from the first on."""

    run_id: str
    name: str  # the name under which the reader keeps the key
    key: Digest  # the id of the key
    commits: int  # the commits that it vouches for
    of: int  # the commits of the log


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The report of a verification.

    Attributes:
        findings: Registry-wide files first, then runs, then objects by their keys.
        runs: Number of runs.
        checkpoints: Number of checkpoints, superseded ones included, evicted ones not.
        objects: Objects under packs/, manifests/ and placements/.
        bytes_checked: Bytes that were read and hashed.
        data: How much of the packs was read; `None` where only the structure was checked.
        standing: Errors that an earlier check of this machine found, and that this one did not look
            for: it read too little.
        unchanged: Runs that were not read again: they are as the last verification found them.
        vouched: Who vouches for which commits of each run; empty without `signed`.
    """

    findings: tuple[Finding, ...]
    runs: int
    checkpoints: int
    objects: int
    bytes_checked: int
    data: DataRead | None = None
    standing: tuple[Finding, ...] = ()
    unchanged: int = 0
    vouched: tuple[Vouched, ...] = ()

    def __repr__(self) -> str:
        found = "ok" if self.ok else "damaged"
        said = f"{len(self.findings)} findings, {self.runs} runs, {self.checkpoints} checkpoints"
        return f"<VerifyReport {found}: {said}, {self.objects} objects>"

    def _repr_html_(self) -> str:
        return markup.safely("Verification", self._html)

    def _html(self) -> str:
        names = ("runs", "unchanged", "checkpoints", "objects")
        facts = {name: getattr(self, name) for name in names} | {"read": size(self.bytes_checked)}
        rows = [(one.severity, one.where, one.message, one.advice) for one in self.findings]
        heads = ("severity", "where", "finding", "what to do")
        table = markup.Rows(heads, rows, len(rows), "findings")
        return markup.describe("Verification", "ok" if self.ok else "damaged", facts, table)

    @property
    def ok(self) -> bool:
        """Whether every checkpoint is whole, as far as this verification checked."""
        return all(finding.severity == "note" for finding in self.findings)


def read_differently(key: ObjectKey) -> Finding:
    """Return the finding of a pack that was damaged when it was read first, and then whole."""
    return Finding(
        key.kind.removesuffix("s"),
        str(key),
        "damaged when it was read first, and whole when it was read again",
        advice="If nobody repaired it meanwhile, a disk, memory or network gives wrong bytes.",
        severity="note",
    )
