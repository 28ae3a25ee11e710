"""The keys of all files in a registry: typed, spelled and parsed.

No other module joins or splits a key.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import Literal, NamedTuple

from holdfast.backends.escape import quoted
from holdfast.registry.errors import InvalidInput, Malformed
from holdfast.registry.values import Digest

Kind = Literal["packs", "manifests", "placements"]
KINDS: tuple[Kind, ...] = ("packs", "manifests", "placements")

CONFIG = "registry.json"
RUNS = "runs/"
EPOCHS = "epochs/"
#: Tables of condemned names, and their shards.
PARTS = "sweeps/"
#: Tables of notes that collectors make.
NOTES = "notes/"
#: Markers of sealed runs to which somebody may write again.
ACTIVE = "active/"
#: Signatures of the heads of runs.
SIGNATURES = "signatures/"
_LOGS = (RUNS, EPOCHS, PARTS, NOTES, ACTIVE, SIGNATURES)
#: The prefixes of all keys of a registry, except its configuration.
FOLDERS: tuple[str, ...] = (*(f"{kind}/" for kind in KINDS), *_LOGS)
#: The folder of probes and clocks; its files are needed only for a moment.
PROBES = ".probe/"
_DIGITS = 20
#: The highest number of a slot or epoch.
LAST: int = 10**_DIGITS - 1

_OBJECT = re.compile(r"(packs|manifests|placements)/([0-9a-f]{2})/([0-9a-f]{64})\.(0|[1-9][0-9]*)")
#: A record of an object's key: the digest, then one byte of the kind and seven of the generation.
_RECORD = struct.Struct(">32sQ")
RECORD_BYTES: int = _RECORD.size
_KIND_SHIFT = 56
_PART = r"sweeps/([0-9a-f]{2})/([0-9a-f]{64})"
_MARKER = r"active/(.+)\.(0|[1-9][0-9]{0,19})"
_SIGNATURE = r"signatures/([^/]+)/([0-9]{20})\.([0-9a-f]{64})"
_PROBE = r"\.probe/(?:clock-[0-9a-f]{16}|[0-9a-f]{16}(?:-race)?/(?:scratch|[0-9]{4}))"
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_RESERVED = {"con", "prn", "aux", "nul", *(f"{p}{i}" for p in ("com", "lpt") for i in range(1, 10))}


class ObjectKey(NamedTuple):
    """The key of an immutable object: `<kind>/<aa>/<sha256>.<generation>`."""

    kind: Kind  # `packs`, `manifests` or `placements`
    digest: Digest  # the digest that names the object
    generation: int  # the epoch that its writer had seen when it was uploaded

    def __str__(self) -> str:
        return f"{stem(self.kind, self.digest)}{self.generation}"

    @classmethod
    def parse(cls, key: str) -> ObjectKey:
        """Read a key."""
        match = _OBJECT.fullmatch(key)
        if match is None or match[3][:2] != match[2]:
            raise Malformed("not the key of an object", where=quoted(key))
        kind: Kind = match[1]  # type: ignore[assignment]  # the pattern admits nothing else
        return cls(kind, Digest.parse(match[3]), int(match[4]))

    @property
    def record(self) -> bytes:
        """The same in 40 bytes; a generation that does not fit, which no epoch has, is cut."""
        generation = min(self.generation, 2**_KIND_SHIFT - 1)
        return _RECORD.pack(self.digest, KINDS.index(self.kind) << _KIND_SHIFT | generation)

    @classmethod
    def of_record(cls, record: bytes) -> ObjectKey:
        """Read a record."""
        digest, rest = _RECORD.unpack(record)
        kind, generation = divmod(rest, 2**_KIND_SHIFT)
        return cls(KINDS[kind], Digest(digest), generation)


def records_in(data: bytes) -> Iterator[bytes]:
    """Return the records of keys that are joined."""
    return (data[at : at + RECORD_BYTES] for at in range(0, len(data), RECORD_BYTES))


def stem(kind: Kind, digest: Digest) -> str:
    """Return the prefix of the keys of all generations of an object."""
    plain = digest.hex()
    return f"{kind}/{plain[:2]}/{plain}."


def slot_key(run_id: str, slot: int) -> str:
    """Return the key of a slot of a run's log."""
    return f"{log_prefix(run_id)}{slot:0{_DIGITS}d}"


def log_prefix(run_id: str) -> str:
    """Return the prefix of the keys of all slots of a run."""
    return f"{RUNS}{run_id}/log/"


def snapshot_prefix(run_id: str) -> str:
    """Return the prefix of the keys of all snapshots of a run."""
    return f"{RUNS}{run_id}/snapshots/"


def snapshot_key(run_id: str, slot: int) -> str:
    """Return the key of a snapshot; slots are inverted, so that the newest is listed first."""
    return f"{snapshot_prefix(run_id)}{LAST - slot:0{_DIGITS}d}"


def epoch_key(epoch: int) -> str:
    """Return the key of an entry of the registry-wide log."""
    return f"{EPOCHS}{epoch:0{_DIGITS}d}"


def note_key(number: int) -> str:
    """Return the key of a table of notes."""
    return f"{NOTES}{number:0{_DIGITS}d}"


def part_key(digest: Digest) -> str:
    """Return the key of a table of condemned names, or of one of its shards."""
    return f"{PARTS}{digest[:1].hex()}/{digest.hex()}"


def marker_key(run_id: str, number: int) -> str:
    """Return the key of a marker of a run."""
    return f"{ACTIVE}{run_id}.{number}"


def parse_marker(key: str) -> tuple[str, int]:
    """Return the run and the number of a marker."""
    match = re.fullmatch(_MARKER, key)
    if match is None or not is_run_id(match[1]):
        raise Malformed("not the key of a marker", where=quoted(key))
    return match[1], int(match[2])


class SignatureKey(NamedTuple):
    """The key of a signature: `signatures/<run id>/<n>.<key id>`."""

    run_id: str
    n: int  # the number of the commit
    key: Digest  # the id of the public key

    def __str__(self) -> str:
        return f"{signatures_prefix(self.run_id)}{self.n:0{_DIGITS}d}.{self.key.hex()}"

    @classmethod
    def parse(cls, key: str) -> SignatureKey:
        """Read a key."""
        match = re.fullmatch(_SIGNATURE, key)
        if match is None or not is_run_id(match[1]):
            raise Malformed("not the key of a signature", where=quoted(key))
        return cls(match[1], int(match[2]), Digest.parse(match[3]))


def signatures_prefix(run_id: str) -> str:
    """Return the prefix of the keys of all signatures of a run."""
    return f"{SIGNATURES}{run_id}/"


def parse_part(key: str) -> Digest:
    """Return the digest that names a part."""
    match = re.fullmatch(_PART, key)
    if match is None or match[1] != match[2][:2]:
        raise Malformed("not the key of a part of a sweep", where=quoted(key))
    return Digest.parse(match[2])


def parse_number(key: str) -> int:
    """Return the number at the end of the key of a slot, an epoch or a table of notes."""
    name = key.rpartition("/")[2]
    if len(name) != _DIGITS or not (name.isascii() and name.isdigit()):
        raise Malformed("not a numbered key", where=quoted(key), expected=f"{_DIGITS} digits")
    return int(name)


def snapshot_slot(key: str) -> int:
    """Return the slot that a snapshot's key names."""
    return LAST - parse_number(key)


def is_probe(key: str) -> bool:
    """Return whether a key is of a file that a probe or a collection makes."""
    return re.fullmatch(_PROBE, key) is not None


def is_run_id(name: object) -> bool:
    """Return whether this is a legal id of a run."""
    if not isinstance(name, str) or not _RUN_ID.fullmatch(name) or name.endswith("."):
        return False
    return name.split(".")[0].lower() not in _RESERVED


def check_run_id(run_id: str) -> str:
    """Return `run_id` if it is a legal id of a run."""
    if not is_run_id(run_id):
        raise InvalidInput(
            "not a legal run id",
            where=quoted(run_id)[:200],
            expected="1 to 128 of [A-Za-z0-9._-], first a letter or digit, last not '.', "
            "and no device name such as CON or NUL",
            hint=_hint(str(run_id)),
        )
    return run_id


def _hint(text: str) -> str | None:
    """Return a guess at the meaning of a text that is no id of a run."""
    name, slash, _ = text.partition("/")
    if slash and is_run_id(name):
        return f"A run is named without a slash, such as {name!r}."
    if not name:
        return "A ref begins with the name of a run: RUN/best."
    slashes = "A ref has slashes: RUN/best, RUN/latest or RUN/tags/NAME."
    return slashes if re.search(r"[@:]", text) else None
