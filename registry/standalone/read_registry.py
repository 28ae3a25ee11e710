"""Read a registry of Holdfast without Holdfast: this file, Python 3.11 and `zstandard` suffice.

    python read_registry.py FOLDER ls
    python read_registry.py FOLDER show REF
    python read_registry.py FOLDER verify
    python read_registry.py FOLDER extract REF DIR

It was written from the specification alone (docs/spec.md): § is a section there. It only reads,
runs nothing that a registry contains, and refuses bytes that are not those that were written.
Exit status: 0 done, 2 usage, 3 wrong argument, 4 not found, 6 damaged, 7 the disk, 8 too new.
"""

import base64
import hashlib
import json
import math
import re
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zstandard

MAX_RECORD = 1_610_612_736  # memory that one record may take, in bytes (§18)
CHUNK = 4_194_304  # bytes of a chunk of a tensor, at most (§5)
NONE = 2**32 - 1  # "no row" in a placement (§7)
WRONG, ABSENT, DAMAGED, DISK, TOO_NEW = 3, 4, 6, 7, 8


class Failure(Exception):
    """The end of the work: an exit status, and one line for people."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def need(condition: object, what: str, status: int = DAMAGED) -> None:
    """Refuse what breaks a rule of the specification; `reading` adds the file."""
    if not condition:
        raise Failure(status, what)


@contextmanager
def reading(where: str) -> Iterator[None]:
    """Name the file in every failure. A record of an unexpected shape is damage."""
    try:
        yield
    except Failure as failure:
        raise Failure(failure.status, f"{where}: {failure}") from None
    except FileNotFoundError:
        raise Failure(DAMAGED, f"{where}: missing") from None
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError,
            struct.error, zstandard.ZstdError) as error:  # fmt: skip
        raise Failure(DAMAGED, f"{where}: malformed ({error})") from None


def sha256(data: bytes) -> str:
    """Return a digest as hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def read(root: Path, key: str) -> bytes:
    """Read a small file of a registry whole (§1)."""
    size = (root / key).stat().st_size
    need(size <= MAX_RECORD, f"{size} bytes are more than a record may have")
    return (root / key).read_bytes()


def names_in(folder: Path) -> list[str]:
    """Return the names in a folder, sorted; none if it is absent."""
    return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []


def key_of(kind: str, digest: str, generation: int) -> str:
    """Return the key of an object (§1)."""
    need(re.fullmatch("[0-9a-f]{64}", digest) and generation >= 0, "not the name of an object")
    return f"{kind}/{digest[:2]}/{digest}.{generation}"


def spelled(value: Any) -> bytes:
    """Return the one spelling that a value has in canonical JSON (§2)."""
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return text.encode()


def canonical(text: bytes) -> Any:
    """Parse canonical JSON and nothing else (§2); its memory is bounded before (§18)."""
    cost = 200 * text.count(b"{") + 100 * text.count(b"[") + 24 * text.count(b'\\"') + 3 * len(text)
    cost += 32 * (text.count(b",") + text.count(b'"')) - 56 * text.count(b'":')
    need(cost <= MAX_RECORD, "a record larger than the limit")
    value = json.loads(text)
    need(spelled(value) == text, "not canonical JSON")
    stack = [value]
    while stack:
        one = stack.pop()
        need(not isinstance(one, float), "a fraction in canonical JSON")
        need(not isinstance(one, int) or abs(one) <= 2**53, "an integer beyond 2^53")
        if isinstance(one, (dict, list)):
            stack.extend(one.values() if isinstance(one, dict) else one)
    return value


def json_lines(data: bytes) -> list[bytes]:
    """Return the lines of a JSON file; the last one of the file is their digest (§1)."""
    body, last = data[:-65], data[-65:]
    need(last == sha256(body).encode() + b"\n", "its bytes do not match the digest at its end")
    need(body[-1:] == b"\n", "a line without its end")
    return body[:-1].split(b"\n")


def frame(data: bytes) -> bytes:
    """Return the content of a frame file: a frame of zstd, and its SHA-256 (§1)."""
    need(hashlib.sha256(data[:-32]).digest() == data[-32:], "its bytes do not match its digest")
    return unzstd(data[:-32], MAX_RECORD)


def unzstd(data: bytes, limit: int) -> bytes:
    """Decompress a frame that states its size; 4 bytes of it give at most 128 KiB."""
    size = zstandard.frame_content_size(data)
    need(0 <= size <= min(limit, len(data) << 15), f"a frame claims {size} bytes")
    return zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)


# Bytes of an element, and the type in a file of NumPy if that can say it.
DTYPES: dict[str, tuple[int, str | None]] = {
    "bool": (1, "|b1"), "int8": (1, "|i1"), "uint8": (1, "|u1"), "int16": (2, "<i2"),
    "uint16": (2, "<u2"), "int32": (4, "<i4"), "uint32": (4, "<u4"), "int64": (8, "<i8"),
    "uint64": (8, "<u8"), "float16": (2, "<f2"), "float32": (4, "<f4"), "float64": (8, "<f8"),
    "complex64": (8, "<c8"), "complex128": (16, "<c16"), "complex32": (4, None),
    "bfloat16": (2, None), "float8_e4m3fn": (1, None), "float8_e4m3fnuz": (1, None),
    "float8_e5m2": (1, None), "float8_e5m2fnuz": (1, None), "float8_e8m0fnu": (1, None),
}  # fmt: skip


class Tensor:
    """A tensor of a manifest: its bytes, or digests of its chunks or of their list (§3)."""

    def __init__(self, record: dict[str, Any]) -> None:
        self.dtype, self.shape = record["dtype"], record["shape"]
        self.original, self.list = record.get("original"), record.get("list")
        need(self.dtype in DTYPES, f"element type {self.dtype!r}", TOO_NEW)
        need(len(self.shape) <= 64, "more than 64 axes")
        need(all(type(length) is int and length >= 0 for length in self.shape), "a shape")
        wide = self.original in ("float32", "float64") and self.dtype in ("float16", "bfloat16")
        need(wide or self.original is None, "an original type (section 33)")
        self.item, self.about = DTYPES[self.dtype][0], {"dtype": self.dtype, "shape": self.shape}
        self.about |= {"original": self.original} if self.original else {}
        self.size = math.prod(self.shape) * self.item
        need(self.size < 2**63, "a tensor of 2^63 bytes")
        self.runs, self.full, self.length, self.rest = self.grid()
        self.count = self.runs * (self.full + (self.rest > 0))
        self.chunks: list[str] = record.get("chunks", [])
        self.data = base64.b64decode(record["data"], validate=True) if "data" in record else None
        kind = set(record) - {"dtype", "shape", "original"}
        if self.data is not None:
            fits = kind == {"data"} and len(self.data) == self.size <= 64
            need(fits and base64.b64encode(self.data).decode() == record["data"], "a small tensor")
        elif self.list is None:
            fits = kind == {"chunks"} and len(self.chunks) == self.count <= 256
            need(fits and self.size > 64, "the number of its chunks")
        else:
            need(kind == {"list"} and self.count > 256, "a digest list")

    def grid(self) -> tuple[int, int, int, int]:
        """Return `rows/1` (§5): runs, whole chunks in each, their length, that of the rest."""
        if self.size == 0:
            return 0, 0, 0, 0
        piece, axis = self.item, len(self.shape)
        while axis and piece * self.shape[axis - 1] <= CHUNK:
            axis, piece = axis - 1, piece * self.shape[axis - 1]
        if axis == 0:
            return 1, 1, piece, 0
        full, rest = divmod(self.shape[axis - 1], CHUNK // piece)
        return math.prod(self.shape[: axis - 1]), full, CHUNK // piece * piece, rest * piece

    def lengths(self) -> Iterator[int]:
        """Yield the length of each chunk in bytes."""
        for _ in range(self.runs):
            yield from (self.length for _ in range(self.full))
            if self.rest:
                yield self.rest


def manifest(root: Path, digest: str, generation: int) -> list[tuple[str, Any, list[Tensor]]]:
    """Read a manifest. Its name is the digest of the digests of its components (§3)."""
    with reading(key := key_of("manifests", digest, generation)):
        record = canonical(frame(read(root, key)))
        need(record["format"] == "holdfast.checkpoint/1", f"format {record['format']!r}", TOO_NEW)
        parts = dict(record["components"])
        need(len(parts) == len(record["components"]), "a component twice")
        need(set(record) == {"format", "kind", "components"}, "an unknown field")
        need(record["kind"] in ("dict", "odict"), "the type of the state")
        digests = [[name, sha256(spelled(part))] for name, part in parts.items()]
        need(sha256(spelled(record | {"components": digests})) == digest, "not the id of its name")
        components = []
        for name, part in parts.items():
            need(part["grid"] == "rows/1", f"grid {part['grid']!r}", TOO_NEW)
            need(len(part) == 3, f"{name!r}: an unknown field")
            tensors = [Tensor(one) for one in part["tensors"]]
            value_of(part["skeleton"], tensors, [""] * len(tensors))
            components.append((name, part["skeleton"], tensors))
    return components


TAGS = {"f", "i", "c", "d", "od", "dd", "counter", "tu", "set", "fset", "deque", "b", "ba", "n",
        "t", "S", "B", "BA", "nt", "ns", "nd", "date", "datetime", "time", "td", "tz", "path",
        "uuid", "decimal", "fraction", "range", "slice", "ellipsis", "ts", "tt", "tv", "tver",
        "coo", "csr", "csc", "bsr", "bsc", "ad"}  # fmt: skip


def value_of(skeleton: Any, tensors: list[Tensor], files: list[str]) -> Any:
    """Return a value as JSON that a person can read (§4); `$TAG` marks what JSON has no form for.

    A tensor is its file, and what it has. They are named in order, each exactly once.
    """
    left = list(enumerate(zip(tensors, files, strict=True)))[::-1]

    def value(node: Any, level: int) -> Any:
        need(level <= 400, "more than 100 levels")
        if isinstance(node, list):
            return [value(item, level + 1) for item in node]
        if not isinstance(node, dict):
            return node
        ((tag, payload),) = node.items()
        need(tag in TAGS, f"a value of type {tag!r}", TOO_NEW)
        if tag == "f" and math.isfinite(number := double(payload)):
            return number
        if tag in ("n", "t", "S", "B", "BA"):
            number, (one, file) = left.pop()
            need(number == payload, "tensors out of order")
            plain = one.dtype == "uint8" and len(one.shape) == 1
            need(plain or tag in ("n", "t"), "a text or bytes that are not uint8")
            return {f"${tag}": {"file": file} | one.about}
        if tag == "nt":  # dates of NumPy: the number of a tensor of int64, and their type
            payload = [{"n": payload[0]}, payload[1]]
        made = value(payload, level + 1)
        if tag == "d" and all(isinstance(key, str) and key[:1] != "$" for key, _ in made):
            need(len(dict(made)) == len(made), "a key twice")
            return dict(made)
        return {f"${tag}": made}

    result = value(skeleton, 0)
    need(not left, "a tensor that the skeleton does not name")
    return result


def double(digits: str) -> float:
    """Return the double of 16 hexadecimal digits (§2)."""
    need(re.fullmatch("[0-9a-f]{16}", digits), "a double")
    return float(struct.unpack(">d", bytes.fromhex(digits))[0])


def lz4(data: bytes, size: int) -> bytes:
    """Decode a block of LZ4: literals, then a copy of what is decoded already, and so on."""
    out, at = bytearray(), 0

    def longer(length: int) -> int:
        nonlocal at
        while length >= 15 and (at := at + 1) and data[at - 1] == 255:
            length += 255
        return length + data[at - 1] if length >= 15 else length

    while at < len(data):
        token, at = data[at], at + 1
        literals = longer(token >> 4)
        out += data[at : at + literals]
        at += literals
        if at >= len(data):
            break
        offset, at = data[at] | data[at + 1] << 8, at + 2
        length = longer(token & 15) + 4
        need(0 < offset <= len(out) and len(out) + length <= size, "a copy in an LZ4 block")
        start = len(out) - offset
        out += (out[start : start + length] * (length // offset + 1))[:length]
    need(len(out) == size and at == len(data), "the length of an LZ4 block")
    return bytes(out)


def blosc(data: bytes, size: int, codec: str) -> bytes:
    """Decode a frame of c-blosc's version 2 (§6): blocks of streams, their bytes shuffled."""
    version, _, flags, item, raw, block, stored = struct.unpack_from("<BBBBIII", data)
    need(version == 2 and raw == size and stored == len(data), "lengths of a Blosc frame")
    number = {"blosc-lz4": 1, "blosc-zstd": 4}[codec]
    need(flags >> 5 == number and not flags & 0b1110 and item, "flags of a Blosc frame")
    need(0 < block <= size, "the length of a Blosc block")
    out = bytearray()
    for at in struct.unpack_from(f"<{-(-size // block)}I", data, 16):
        length = min(block, size - len(out))
        streams = item if length == block and not flags & 16 else 1
        need(length % streams == 0, "streams of a Blosc block")
        part, plain = length // streams, bytearray()
        for _ in range(streams):
            (taken,) = struct.unpack_from("<I", data, at)
            piece, at = data[at + 4 : at + 4 + taken], at + 4 + taken
            plain += piece if taken == part else (lz4 if number == 1 else unzstd)(piece, part)
        need(len(plain) == length, "the length of a Blosc block")
        if flags & 1:  # shuffled: the first bytes of all elements, then their second bytes, ...
            shuffled, count = bytes(plain), length // item
            for i in range(item):
                plain[i : count * item : item] = shuffled[i * count : (i + 1) * count]
        out += plain
    return bytes(out)


CODECS = ["raw", "blosc-zstd", "blosc-lz4"]  # in the order of their numbers (§6)


class Pack:
    """Encoded chunks, their table, and a trailer of 48 bytes (§6)."""

    def __init__(self, root: Path, key: str) -> None:
        self.root, self.key = root, key
        with reading(key):
            self.size = (root / key).stat().st_size
            need(self.size >= 48, "shorter than a trailer")
            trailer = self.range(self.size - 48, 48)
            length = int.from_bytes(trailer[:8], "little")
            need(length <= min(self.size - 48, MAX_RECORD), f"its table claims {length} bytes")
            table = self.range(self.size - 48 - length, length)
            need(trailer[40:] == b"HFPACK1\n", "no pack of version 1")
            need(sha256(table) == trailer[8:40].hex(), "its table has another digest")
            need(sha256(table) == Path(key).stem, "not the table of its name")
            record = canonical(table)
            need(record["format"] == "holdfast.pack/1", f"format {record['format']!r}", TOO_NEW)
            self.entries, at = dict[int, list[Any]](), 0
            for row in record["chunks"]:
                _, stored, raw, codec, base, stored_digest = self.entries.setdefault(at, row)
                need(codec in CODECS, f"codec {codec!r}", TOO_NEW)
                fits = 0 < stored == raw and base is stored_digest is None
                fits = fits if codec == "raw" else 0 < stored < raw <= stored << 15
                need(fits, f"the row of the chunk at {at}")
                at += stored
            need(at == self.size - 48 - length, "its chunks do not end at its table")

    def range(self, offset: int, length: int) -> bytes:
        """Read a part of the file."""
        with (self.root / self.key).open("rb") as file:
            file.seek(offset)
            return file.read(length)

    def chunk(self, offset: int) -> bytes:
        """Read the stored bytes of a chunk, and compare them with their digest."""
        digest, stored, _, codec, _, stored_digest = self.entries[offset]
        data = self.range(offset, stored)
        expected = digest if codec == "raw" else stored_digest
        need(sha256(data) == expected, f"the chunk at {offset} has other bytes")
        return data


class Placed:
    """A state with its placement: finds and reads its chunks."""

    def __init__(self, root: Path, place: dict[str, Any]) -> None:
        self.root, self.opened = root, dict[int, Pack]()
        self.components = manifest(root, place["manifest"], place["manifest_generation"])
        self.key = key_of("placements", place["placement"], place["placement_generation"])
        with reading(self.key):
            content = frame(read(root, self.key))
            need(sha256(content) == place["placement"], "not the content of its name")
            line, _, columns = content.partition(b"\n")
            head = canonical(line)
            known = ("holdfast.placement/1", "holdfast.placement/2")
            need(head["format"] in known, f"format {head['format']!r}", TOO_NEW)
            need(head["manifest"] == place["manifest"], "the placement of another state")
            names = [name for name, _, _ in self.components]
            self.covered: set[str] = set(listed := head.get("components", names))
            need([x for x in names if x in self.covered] == listed, "names of components")
            rows, self.packs, self.columns = head["rows"], head["packs"], []
            need(len(columns) == rows * 21, "the length of its columns")
            for form in "IQIBI":  # pack, offset, stored length, codec, row of the base
                width = struct.calcsize("<" + form) * rows
                self.columns.append(struct.unpack(f"<{rows}{form}", columns[:width]))
                columns = columns[width:]
            self.index_rows(head["extra"], rows)

    def index_rows(self, extra: list[str], rows: int) -> None:
        """Number the distinct chunks: those of the manifest, of its lists, extra ones (§7)."""
        parts = [tensors for name, _, tensors in self.components if name in self.covered]
        tensors = [one for part in parts for one in part]
        named = dict.fromkeys(x for one in tensors for x in one.chunks or [one.list or ""] if x)
        self.row = {digest: row for row, digest in enumerate(named)}
        self.digests = [*named, *[""] * (rows - len(named) - len(extra)), *extra]
        for one in tensors:
            named |= dict.fromkeys(self.chunks_of(one))
        need(not named.keys() & set(extra), "an extra chunk that is none")
        self.digests = [*named, *extra]
        self.row = {digest: row for row, digest in enumerate(self.digests)}
        need(len(self.digests) == rows == len(self.row), "the number of its rows")

    def chunks_of(self, one: Tensor) -> list[str]:
        """Return the digests of the chunks of a tensor, from its list if it has one (§3)."""
        if one.list is None:
            return one.chunks
        data = self.chunk(one.list, 32 * one.count)
        return [data[at : at + 32].hex() for at in range(0, len(data), 32)]

    def stored(self, row: int, length: int) -> tuple[bytes, int]:
        """Return the decoded bytes of a row, and the row of its base (§6)."""
        number, offset, stored, codec, base = (column[row] for column in self.columns)
        name, generation, size = self.packs[number]
        if number not in self.opened:
            self.opened[number] = Pack(self.root, key_of("packs", name, generation))
        pack = self.opened[number]
        with reading(pack.key):
            need(pack.size == size, f"{pack.size} bytes; its placement says {size}")
            entry = pack.entries[offset]
            base_digest = None if base == NONE else self.digests[base]
            same = [self.digests[row], stored, length, CODECS[codec], base_digest]
            need(entry[:5] == same, f"its table differs from row {row} of {self.key}")
            data = pack.chunk(offset)
            return data if codec == 0 else blosc(data, length, CODECS[codec]), base

    def chunk(self, digest: str, length: int) -> bytes:
        """Return a chunk, verified: the XOR of a delta and the chain of its bases (§6)."""
        need(length < MAX_RECORD, "a digest list larger than the limit")
        total, row = 0, self.row[digest]
        for _ in range(33):
            data, base = self.stored(row, length)
            total ^= int.from_bytes(data, "little")
            if base == NONE:
                joined = total.to_bytes(length, "little")
                need(sha256(joined) == digest, f"chunk {digest} decodes to other bytes")
                return joined
            row = base
        raise Failure(DAMAGED, f"{self.key}: a chain of more than 32 deltas")

    def bytes_of(self, one: Tensor) -> Iterator[bytes]:
        """Yield the bytes of a tensor, verified."""
        yield one.data or b""
        for digest, length in zip(self.chunks_of(one), one.lengths(), strict=one.data is None):
            yield self.chunk(digest, length)


# §8: the actions of a log. Another one stops the reader.
ACTIONS = {"run.create", "run.status", "run.take_over", "run.rewind", "run.drop", "run.hide",
           "run.undrop", "run.raise_version", "phase.enter", "checkpoint.add",
           "checkpoint.report", "checkpoint.evict", "checkpoint.thin", "checkpoint.recover",
           "hold.set", "hold.remove", "note.set", "run.label", "tag.set", "tag.remove", "pin.set",
           "release.point", "pool.promote", "pool.rate", "pool.evict", "stream.append",
           "stream.archive", "watch.claim", "watch.ack"}  # fmt: skip
Record = dict[str, Any]


class Run:
    """A run: what is left when its log is replayed (§8, §9)."""

    def __init__(self, root: Path, name: str) -> None:
        self.name, self.status, self.over, self.release = name, "running", "", ""
        self.places, self.checkpoints = dict[str, Record](), dict[int, Record]()
        self.pins, self.tags = dict[tuple[str, str], Record](), dict[str, int]()
        self.pool, self.entered = dict[int, Record](), list[Record]()
        self.commits, self.head, self.created = 0, "", Record()
        for slot, file in enumerate(names_in(root / f"runs/{name}/log")):
            with reading(key := f"runs/{name}/log/{file}"):
                need(file == f"{slot:020}", f"slot {slot} of the log is missing")
                for line in json_lines(read(root, key)):
                    self.line(line, canonical(line))

    def line(self, text: bytes, record: Record) -> None:
        """Apply a line of a slot. Commits are numbered, and chained by their digests."""
        kind = record["kind"]
        known = ("commit", "place", "mark", "forget", "free", "seal")
        need(kind in known, f"a line of kind {kind!r}", TOO_NEW)
        if kind == "place":
            self.places[record["manifest"]] = record
        self.over = "forgotten" if kind == "forget" else self.over
        if kind == "commit":
            undrop = self.over == "hidden" and record["actions"] == [{"action": "run.undrop"}]
            need(not self.over or undrop, "a commit after the end of the run")
            here = (record["n"], record["run"]) == (self.commits, self.name)
            need(here, "a commit of another number or run")
            need(record.get("prev", "") == self.head, "the chain of commits is broken")
            for action in record["actions"]:
                need(action["action"] in ACTIONS, f"the action {action['action']!r}", TOO_NEW)
                self.apply(action, record["n"])
            self.commits, self.head = self.commits + 1, sha256(text)

    def apply(self, action: Record, n: int) -> None:
        """Apply an action of commit n, if a name depends on it."""
        match action["action"]:
            case "run.create":
                self.created = action
            case "run.status":
                self.status = action["status"]
            case "run.drop":
                self.over = "dropped"
            case "run.hide":
                self.over = "hidden"
            case "run.undrop":
                self.over = ""
            case "run.rewind":
                for one in [*self.checkpoints.values(), *self.entered]:
                    one["superseded"] |= one["n"] > action.get("to", 0)
            case "phase.enter":
                self.entered.append(action | {"n": n, "superseded": False})
            case "checkpoint.add":
                self.checkpoints[n] = action | {"n": n, "superseded": False, "evicted": False}
            case "checkpoint.report":
                self.checkpoints[action["checkpoint"]]["metrics"] |= action["metrics"]
            case "checkpoint.evict":
                for one in action["evictions"]:
                    self.checkpoints[one["checkpoint"]]["evicted"] = True
            case "checkpoint.recover":
                for number in action["checkpoints"]:
                    self.checkpoints[number]["evicted"] = False
            case "tag.set":
                self.tags[action["name"]] = action["checkpoint"]
            case "tag.remove":
                del self.tags[action["name"]]
            case "pin.set":
                self.pins[action["kind"], action["name"]] = action
                self.release = action["name"] if action["kind"] == "release" else self.release
            case "release.point":
                self.release = action["version"]
            case "pool.promote":
                self.pool[action["version"]] = action
            case "pool.evict":
                for version in action["versions"]:
                    del self.pool[version]


def measured(metrics: Record, monitor: str) -> float:
    """Return a metric, or a sum such as `mu - 3*sigma`; NaN where one is missing (§21)."""
    terms = re.findall(
        r"(?:^|\s+([+-])\s+)(?:(\d+(?:\.\d+)?)\s*\*\s*)?(.+?)(?=\s+[+-]\s|$)", monitor
    )
    values = [double(metrics.get(name, "7ff8000000000000")) for _, _, name in terms]
    factors = [float(factor or 1) * (-1 if sign == "-" else 1) for sign, factor, _ in terms]
    return sum(factor * value for factor, value in zip(factors, values, strict=True))


def refs(run: Run) -> dict[str, Record]:
    """Return every name of a run (§16), without `RUN/`, and the record with its manifest."""
    kept = [one for one in run.checkpoints.values() if not one["evicted"]]
    live = [one for one in kept if not one["superseded"]]
    entered = [one for one in run.entered if not one["superseded"]]
    last = max([*live, *entered], key=lambda one: int(one["n"]), default=Record())
    current = last.get("to_phase", last.get("phase"))
    pivots = {one["to_phase"]: one["n"] for one in entered if "name" in one}  # §25
    spec = run.created.get("spec", {})
    declared = {phase["name"]: phase["monitors"] for phase in spec.get("phases", [])}
    usual = run.created["monitors"] or spec.get("monitors", [])
    found = {one["manifest"]: one for one in kept}
    for phase in ["", *dict.fromkeys(one["phase"] for one in live)]:
        mine = [one for one in live if phase in ("", one["phase"])]
        at = (f"phase{phase}/" if phase.isdigit() else f"{phase}/") if phase else ""
        found |= {f"{at}step{one['step']:08}": one for one in mine if at}
        mine = [one for one in mine if not one.get("held_back")]
        found |= {f"{at}latest": one for one in mine}  # the last one stays
        monitors: list[Record] = declared.get(phase or current) or usual
        for monitor in reversed(monitors):
            metric, sign = monitor["metric"], -1 if monitor["mode"] == "min" else 1
            values = [(sign * measured(one["metrics"], metric), -one["n"], one) for one in mine
                      if one["n"] > pivots.get(one["phase"], 0)
                      and (phase or not declared or one["phase"] == current)]  # fmt: skip
            best = max([value for value in values if not math.isnan(value[0])], default=None)
            names = ("", f"/{monitor.get('name', metric)}")
            found |= {f"{at}best{name}": best[2] for name in names if best}
    found |= {f"tags/{name}": run.checkpoints[n] for name, n in run.tags.items()}
    found |= {f"{kind}s/{name}": pin for (kind, name), pin in run.pins.items()}
    found |= {f"pool/v{version:04}": entry for version, entry in run.pool.items()}
    found |= {"releases/latest": run.pins["release", run.release]} if run.release else {}
    companions = {f"{ref}/companions/{name}": {"manifest": digest} for ref, one in found.items()
                  for name, digest in one.get("companions", {}).items()}  # fmt: skip
    return {} if run.over else found | companions


def find(root: Path, ref: str) -> tuple[Run, Record]:
    """Find the run of a ref, and the record that names its state (§16)."""
    name, _, rest = ref.partition("/")
    runs = [Run(root, one) for one in run_names(root) if name == one]
    if runs:
        steps = re.sub(r"/step(\d+)", lambda m: f"/step{int(m[1]):08}", "/" + (rest or "latest"))
        if one := refs(runs[0]).get(steps[1:]):
            return runs[0], one
    digits = rest if runs else ref
    runs = runs or [Run(root, one) for one in run_names(root)]
    wanted = re.fullmatch("[0-9a-f]{8,64}", digits)
    found = {digest: (run, refs(run).get(digest, {"manifest": digest}))
             for run in runs if wanted and not run.over
             for digest in run.places if digest.startswith(digits)}  # fmt: skip
    need(len(found) == 1, f"{ref}: {'several' if found else 'no'} states have this name", ABSENT)
    return next(iter(found.values()))


def run_names(root: Path) -> list[str]:
    """Check that this is a registry, and return the names of its runs (§1)."""
    need((root / "registry.json").is_file(), f"{root}: no registry is here", ABSENT)
    with reading("registry.json"):
        head = canonical(json_lines(read(root, "registry.json"))[0])
        need(head["format"] == "holdfast.registry/1", f"format {head['format']!r}", TOO_NEW)
    return names_in(root / "runs")


def say(*columns: object) -> None:
    """Print a line; no character of a registry may steer a terminal."""
    text = "\t".join(map(str, columns))
    sys.stdout.write("".join(x if x.isprintable() or x == "\t" else "?" for x in text) + "\n")


def ls(root: Path) -> None:
    """List the runs, and each name in them with the id of its state."""
    for name in run_names(root):
        run = Run(root, name)
        say(name, f"{run.over or run.status}, {run.commits} commits")
        for ref, one in refs(run).items():
            say(f"{name}/{ref}", one["manifest"])


def describe(root: Path, ref: str) -> tuple[Record, Placed]:
    """Find a state, and say what its run says of it."""
    run, one = find(root, ref)
    need(one["manifest"] in run.places, f"{ref}: the log has no place of {one['manifest']}")
    placed, keys = Placed(root, run.places[one["manifest"]]), one.get("commit_keys", {})
    about: Record = {"ref": ref, "id": one["manifest"], "run": run.name}
    about |= {key: one[key] for key in ("phase", "step", "version", "name") if key in one}
    about["metrics"] = {key: repr(double(digits)) for key, digits in one.get("metrics", {}).items()}
    about["meta"] = value_of(one.get("meta"), [], [])
    # Keys that the commit holds instead of the manifest, and the order of all keys (§20).
    about["commit_keys"] = value_of(keys.get("values", {"d": []}), [], [])
    about["order"] = keys.get("order", [name for name, _, _ in placed.components])
    # Components that retention gave up (§22).
    about["given_up"] = sorted({name for name, _, _ in placed.components} - placed.covered)
    return about, placed


def show(root: Path, ref: str) -> None:
    """Print a state without its values."""
    about, placed = describe(root, ref)
    about["tensors"] = {name: [one.about for one in parts] for name, _, parts in placed.components}
    sys.stdout.write(json.dumps(about, indent=1) + "\n")


def extract(root: Path, ref: str, folder: str) -> None:
    """Write a state: `state.json` with its values, and a file for each tensor."""
    about, placed = describe(root, ref)
    target, state, number = Path(folder), about.pop("commit_keys"), 0
    target.mkdir(parents=True, exist_ok=True)
    need(not any(target.iterdir()), f"{folder}: not an empty folder", WRONG)
    for name, skeleton, tensors in placed.components:
        files = list[str]()
        for one in tensors if name in placed.covered else []:
            form = DTYPES[one.dtype][1]
            files.append(f"{number:06}.{'npy' if form else 'bin'}")
            number += 1
            with (target / files[-1]).open("xb") as file:
                if form:  # the header of NumPy's format 1.0 ends at a multiple of 64 bytes
                    shape = "".join(f"{length}, " for length in one.shape)
                    head = f"{{'descr': {form!r}, 'fortran_order': False, 'shape': ({shape}), }}"
                    head += " " * (-(len(head) + 11) % 64) + "\n"
                    file.write(b"\x93NUMPY\1\0" + struct.pack("<H", len(head)) + head.encode())
                file.writelines(placed.bytes_of(one))
        if name in placed.covered:
            state[name] = value_of(skeleton, tensors, files)
    about["state"] = {name: state[name] for name in about.pop("order") if name in state}
    (target / "state.json").write_text(json.dumps(about, indent=1) + "\n")
    say(f"{number} tensors in {folder}")


def verify(root: Path) -> None:
    """Check every file, every log, and all chunks of the states that are there or needed."""
    problems, counts = list[Failure](), dict.fromkeys(("files", "runs", "states"), 0)

    @contextmanager
    def noting(kind: str, where: str) -> Iterator[None]:
        counts[kind] += 1
        try:
            with reading(where):
                yield
        except Failure as failure:
            problems.append(failure)

    epochs = names_in(root / "epochs")
    dense = epochs == [f"{n:020}" for n in range(1, 1 + len(epochs))]
    problems += [] if dense else [Failure(DAMAGED, "epochs: one is missing")]
    for path in sorted(root.rglob("*")):
        key = path.relative_to(root).as_posix()
        if path.is_file() and not key.startswith((".tmp/", ".probe/")):
            with noting("files", key):
                check_file(root, key)
    for name in run_names(root):
        with noting("runs", f"runs/{name}"):
            run = Run(root, name)
            needed = {one["manifest"]: ref for ref, one in reversed(refs(run).items())}
            for digest in needed | run.places:
                place = run.places.get(digest, {})
                keys = [key_of(f"{x}s", place[x], place[f"{x}_generation"])
                        for x in ("manifest", "placement") if place]  # fmt: skip
                if digest in needed or all((root / key).is_file() for key in keys):
                    with noting("states", f"{name}/{needed.get(digest, digest)}"):
                        need(place, "the log has no place of it")
                        check_state(Placed(root, place))
    for problem in problems:
        say("error:", problem)
    need(not problems, f"{len(problems)} errors", max((x.status for x in problems), default=0))
    say(f"ok: {counts['runs']} runs, {counts['states']} states, {counts['files']} files")


def check_state(placed: Placed) -> None:
    """Read every chunk of a state."""
    for name, _, tensors in placed.components:
        for one in tensors if name in placed.covered else []:
            for _ in placed.bytes_of(one):
                pass


def check_file(root: Path, key: str) -> None:
    """Check one file by itself (§1)."""
    kind, (digest, _, generation) = key.split("/")[0], key.split("/")[-1].partition(".")
    if kind == "packs":
        pack = Pack(root, key)
        for offset in pack.entries:
            pack.chunk(offset)
    elif kind == "manifests":
        manifest(root, digest, int(generation))
    elif kind == "active":
        need(re.fullmatch(r"active/.+\.\d+", key) and not read(root, key), "no marker")
    elif kind in ("placements", "notes"):
        content = frame(read(root, key))
        need(kind == "notes" or sha256(content) == digest, "not the content of its name")
    elif kind == "sweeps":  # a table, or a shard: its index has the digests of its blocks (§10)
        data = read(root, key)
        blocks = -(-len(data) // 40 // 401) if sha256(data) != digest else 0
        need(not blocks or sha256(data[: 40 * blocks]) == digest, "not the content of its name")
        for at in range(blocks):
            block = data[40 * blocks + 16_000 * at :][:16_000]
            row = block[:8] + hashlib.sha256(block).digest()
            need(row == data[40 * at : 40 * at + 40], f"block {at} has other bytes")
    else:
        numbered = re.fullmatch(r"(runs/[^/]+/(log|snapshots)|epochs)/\d{20}", key)
        need(numbered or kind in ("registry.json", "signatures"), "no file of a registry")
        for value in map(canonical, json_lines(read(root, key))):
            if kind == "signatures":  # whose keys are trusted, a reader of it must know (§48)
                named = f"signatures/{value['run']}/{value['n']:020}.{value['key']}"
                need(key == named, "a signature under another name")


def main(arguments: list[str]) -> int:
    """Run a command."""
    commands = {("ls", 2): ls, ("verify", 2): verify, ("show", 3): show, ("extract", 4): extract}
    command: Any = commands.get((" ".join(arguments[1:2]), len(arguments)))
    if command is None:
        sys.stderr.write(
            "usage: read_registry.py FOLDER ls | show REF | verify | extract REF DIR\n"
        )
        return 2
    try:
        with reading(arguments[0]):
            command(Path(arguments[0]), *arguments[2:])
    except (Failure, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return error.status if isinstance(error, Failure) else DISK
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
