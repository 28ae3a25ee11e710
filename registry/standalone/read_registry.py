"""Read a registry of Holdfast without Holdfast: this file, Python 3.11 and `zstandard` suffice.

Usage: python read_registry.py FOLDER ls | show REF | verify | extract REF DIR
Exit status: 0 done, 2 usage, 3 wrong argument, 4 not found, 6 damaged, 7 the disk, 8 too new.
Written from docs/spec.md alone, whose sections are §. It runs nothing that a registry contains.
"""

import base64
import hashlib
import io
import json
import math
import re
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import zstandard

Record = dict[str, Any]  # an object of JSON
MAX_RECORD = 1_610_612_736  # memory that one record may take, in bytes (§18)
CHUNK = 4_194_304  # bytes of a chunk of a tensor, at most (§5)
NO_BASE = 2**32 - 1  # the base row of a chunk that is no delta (§7)
CODECS = ["raw", "blosc-zstd", "blosc-lz4"]  # in the order of their numbers (§6)
WRONG, ABSENT, DAMAGED, DISK, TOO_NEW = 3, 4, 6, 7, 8
# Types of tensors (§3), as files of NumPy name them; V and the size where NumPy has no such type.
DTYPES = {"bool": "|b1", "int8": "|i1", "uint8": "|u1", "int16": "<i2", "uint16": "<u2",
          "int32": "<i4", "uint32": "<u4", "int64": "<i8", "uint64": "<u8", "float16": "<f2",
          "float32": "<f4", "float64": "<f8", "complex64": "<c8", "complex128": "<c16",
          "complex32": "|V4", "bfloat16": "|V2", "float8_e4m3fn": "|V1", "float8_e5m2": "|V1",
          "float8_e4m3fnuz": "|V1", "float8_e5m2fnuz": "|V1", "float8_e8m0fnu": "|V1"}  # fmt: skip
# Types of other values (§4); lines and actions of a log (§8), and those after which a run is over.
TAGS = {"f", "i", "c", "d", "od", "dd", "counter", "tu", "set", "fset", "deque", "b", "ba", "n",
        "t", "S", "B", "BA", "nt", "ns", "nd", "date", "datetime", "time", "td", "tz", "path",
        "uuid", "decimal", "fraction", "range", "slice", "ellipsis", "ts", "tt", "tv", "tver",
        "coo", "csr", "csc", "bsr", "bsc", "ad"}  # fmt: skip
LINES = {"commit", "place", "mark", "forget", "free", "seal"}
ACTIONS = {"run.create", "run.status", "run.take_over", "run.rewind", "run.drop", "run.hide",
           "run.undrop", "run.raise_version", "phase.enter", "checkpoint.add", "checkpoint.report",
           "checkpoint.evict", "checkpoint.thin", "checkpoint.recover", "hold.set", "hold.remove",
           "note.set", "run.label", "tag.set", "tag.remove", "pin.set", "release.point",
           "pool.promote", "pool.rate", "pool.evict", "stream.append", "stream.archive",
           "watch.claim", "watch.ack"}  # fmt: skip
ENDS = {"run.drop": "dropped", "run.hide": "hidden", "run.undrop": "", "forget": "forgotten"}


class Failure(Exception):
    """The end of the work. Its arguments are one line for people, and an exit status."""


def need(condition: object, what: str, status: int = DAMAGED) -> None:
    """Refuse what breaks a rule of the specification; `reading` adds the file."""
    if not condition:
        raise Failure(what, status)


@contextmanager
def reading(where: str, problems: list[Failure] | None = None) -> Iterator[None]:
    """Name the file in a failure, and raise it, or note it. A record of another shape is damage."""
    try:
        yield
        return
    except Failure as failure:
        what, status = failure.args
    except FileNotFoundError:
        what, status = "missing", DAMAGED
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError,
            struct.error, zstandard.ZstdError) as error:  # fmt: skip
        what, status = f"malformed ({error})", DAMAGED
    if problems is None:
        raise Failure(f"{where}: {what}", status)
    problems.append(Failure(f"{where}: {what}", status))


def sha256(data: bytes) -> str:
    """Return a digest as hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def names_in(folder: Path) -> list[str]:
    """Return the names in a folder, sorted; none if it is absent."""
    return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []


def key_of(kind: str, digest: str, generation: int) -> str:
    """Return the key of an object (§1)."""
    need(re.fullmatch("[0-9a-f]{64}", digest) and generation >= 0, "not the name of an object")
    return f"{kind}/{digest[:2]}/{digest}.{generation}"


def read(root: Path, key: str, start: int = 0, length: int | None = None) -> bytes:
    """Read a file of a registry, or a part of it; at most what a record may take (§18)."""
    with (root / key).open("rb") as file:
        length = file.seek(0, 2) if length is None else length
        need(length <= MAX_RECORD, f"{length} bytes are more than a record may have")
        file.seek(start)
        return file.read(length)


def spelled(value: Any) -> bytes:
    """Return the one spelling that a value has in canonical JSON (§2)."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode()


def canonical(text: bytes, *formats: str) -> Any:
    """Parse canonical JSON and nothing else (§2); its memory is bounded before (§18)."""
    cost = 200 * text.count(b"{") + 100 * text.count(b"[") + 24 * text.count(b'\\"') + 3 * len(text)
    cost += 32 * (text.count(b",") + text.count(b'"')) - 56 * text.count(b'":')
    need(cost <= MAX_RECORD, "a record larger than the limit")

    def integer(digits: str) -> int:  # int() refuses fractions, exponents and NaN
        need(abs(number := int(digits)) <= 2**53, "an integer beyond 2^53")
        return number

    value = json.loads(text, parse_int=integer, parse_float=integer, parse_constant=integer)
    need(spelled(value) == text, "not canonical JSON")
    if formats:
        need(value["format"] in formats, f"format {value['format']!r}", TOO_NEW)
    return value


def json_lines(data: bytes) -> list[bytes]:
    """Return the lines of a JSON file; the last one of the file is their digest (§1)."""
    need(data[-65:] == sha256(data[:-65]).encode() + b"\n", "its bytes do not match its last line")
    need(data[-66:-65] == b"\n", "a line without its end")
    return data[:-66].split(b"\n")


def frame(data: bytes) -> bytes:
    """Return the content of a frame file: a frame of zstd, and its SHA-256 (§1)."""
    need(hashlib.sha256(data[:-32]).digest() == data[-32:], "its bytes do not match its digest")
    return unzstd(data[:-32], MAX_RECORD)


def unzstd(data: bytes, limit: int) -> bytes:
    """Decompress a frame that states its size; 4 bytes of it give at most 128 KiB."""
    size = zstandard.frame_content_size(data)
    need(0 <= size <= min(limit, len(data) << 15), f"a frame claims {size} bytes")
    return zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)


def double(digits: str) -> float:
    """Return the double of 16 hexadecimal digits (§2)."""
    need(re.fullmatch("[0-9a-f]{16}", digits), "a double")
    return float(struct.unpack(">d", bytes.fromhex(digits))[0])


class Tensor:
    """A tensor of a manifest: its bytes, or digests of its chunks or of their list (§3)."""

    def __init__(self, record: Record) -> None:
        self.about: Record = {x: record[x] for x in ("dtype", "shape", "original") if x in record}
        self.dtype, self.shape, original = record["dtype"], record["shape"], record.get("original")
        need(self.dtype in DTYPES, f"element type {self.dtype!r}", TOO_NEW)
        need(len(self.shape) < 65 and all(type(x) is int and x >= 0 for x in self.shape), "a shape")
        narrowed = self.dtype in ("float16", "bfloat16") and original in ("float32", "float64")
        need(narrowed or original is None, f"{self.dtype} made from {original!r} (§33)")
        # The grid (§5): an axis of `rows` pieces is cut into `cuts` chunks of `whole` pieces.
        self.piece, axes = int(DTYPES[self.dtype][2:]), list(self.shape)
        self.size = math.prod(self.shape) * self.piece
        need(self.size < 2**63, "a tensor of 2^63 bytes")
        while axes and self.piece * axes[-1] <= CHUNK:
            self.piece *= axes.pop()
        self.rows, self.whole = axes.pop() if axes else 1, CHUNK // max(self.piece, 1)
        self.cuts = -(-self.rows // self.whole)
        self.count = math.prod(axes) * self.cuts if self.size else 0
        form = "data" if self.size <= 64 else "chunks" if self.count <= 256 else "list"
        need(set(record) - set(self.about) == {form}, f"{self.size} bytes that are not in {form}")
        self.data = base64.b64decode(record.get("data", ""))
        need(base64.b64encode(self.data).decode() == record.get("data", ""), "not base64")
        need(form != "data" or len(self.data) == self.size, f"not {self.size} bytes")
        self.list, self.chunks = record.get("list", ""), record.get("chunks", [])
        need(form != "chunks" or len(self.chunks) == self.count, f"not {self.count} chunks")


def manifest(root: Path, key: str) -> list[tuple[str, Any, list[Tensor]]]:
    """Read a manifest. Its name is the digest of the digests of its components (§3)."""
    record, components = canonical(frame(read(root, key)), "holdfast.checkpoint/1"), []
    need(len(record) == 3 and record["kind"] in ("dict", "odict"), "an unknown field or kind")
    ids = [[name, sha256(spelled(part))] for name, part in record["components"]]
    need(sha256(spelled(record | {"components": ids})) == Path(key).stem, "not the id of its name")
    need(len(dict(ids)) == len(ids), "a component twice")
    for name, part in record["components"]:
        need(part["grid"] == "rows/1", f"grid {part['grid']!r}", TOO_NEW)
        need(len(part) == 3, f"{name!r}: an unknown field")
        tensors = [Tensor(one) for one in part["tensors"]]
        value_of(part["skeleton"], left := list(enumerate(tensors))[::-1])
        need(not left, "a tensor that the skeleton does not name")
        components.append((name, part["skeleton"], tensors))
    return components


def value_of(node: Any, left: list[tuple[int, Tensor]], level: int = 0) -> Any:
    """Return a value as JSON that people can read (§4); its tensors are the last of `left`."""
    need(level <= 400, "more than 100 levels")
    if isinstance(node, list):
        return [value_of(item, left, level + 1) for item in node]
    if not isinstance(node, dict):
        return node
    ((tag, payload),) = node.items()
    need(tag in TAGS, f"a value of type {tag!r}", TOO_NEW)
    if tag in ("n", "t", "S", "B", "BA"):
        number, one = left.pop()
        need(number == payload, "tensors out of order")
        need(tag in ("n", "t") or (one.dtype, len(one.shape)) == ("uint8", 1), "bytes not of uint8")
        return {f"${tag}": one.about}
    if tag == "nt":  # dates of NumPy: the number of a tensor of int64, and their type
        payload = [{"n": payload[0]}, payload[1]]
    made = value_of(payload, left, level + 1)
    if tag == "f" and math.isfinite(double(made)):
        return double(made)
    if tag == "d" and all(isinstance(key, str) and key[:1] != "$" for key, _ in made):
        need(len(dict(made)) == len(made), "a key twice")
        return dict(made)
    return {f"${tag}": made}


def lz4(data: bytes, size: int) -> bytes:
    """Decode a block of LZ4: literals, then a copy of what is decoded already, and so on."""
    rest, out = io.BytesIO(data), bytearray()

    def extended(length: int) -> int:
        more = 255 if length == 15 else 0
        while more == 255:
            length += (more := rest.read(1)[0])
        return length

    while token := rest.read(1):
        literals = rest.read(length := extended(token[0] >> 4))
        need(len(literals) == length, "the end of an LZ4 block")
        out += literals
        if rest.tell() < len(data):
            offset = int.from_bytes(rest.read(2), "little")
            length = extended(token[0] & 15) + 4
            need(0 < offset <= len(out) and len(out) + length <= size, "a copy in an LZ4 block")
            out += (out[-offset : len(out) - offset + length] * (length // offset + 1))[:length]
    need(len(out) == size, "the length of an LZ4 block")
    return bytes(out)


def blosc(data: bytes, size: int, codec: str) -> bytes:
    """Decode a frame of c-blosc's version 2 (§6): blocks of streams, their bytes shuffled."""
    version, _, flags, item, raw, block, stored = struct.unpack_from("<BBBBIII", data)
    need(version == 2 and raw == size >= block > 0 and stored == len(data), "lengths of a frame")
    number, decode = (1, lz4) if codec == "blosc-lz4" else (4, unzstd)
    need(flags >> 5 == number and not flags & 0b1110 and item, "flags of a Blosc frame")
    out = bytearray()
    for at in struct.unpack_from(f"<{-(-size // block)}I", data, 16):
        length = min(block, size - len(out))
        streams = item if length == block and not flags & 16 else 1
        need(length % streams == 0, "streams of a Blosc block")
        part, plain = length // streams, bytearray()
        for _ in range(streams):
            (taken,) = struct.unpack_from("<I", data, at)
            piece, at = data[at + 4 : at + 4 + taken], at + 4 + taken
            plain += piece if taken == part else decode(piece, part)
        need(len(plain) == length, "the length of a Blosc block")
        if flags & 1:  # shuffled: the first bytes of all elements, then their second bytes, ...
            shuffled, count = bytes(plain), length // item
            for i in range(item):
                plain[i : count * item : item] = shuffled[i * count : (i + 1) * count]
        out += plain
    return bytes(out)


def pack_table(root: Path, key: str, claimed: int | None = None) -> dict[int, list[Any]]:
    """Return the rows of the table of a pack, by the offsets of their chunks (§6)."""
    size, rows, at = (root / key).stat().st_size, dict[int, list[Any]](), 0
    need(claimed in (None, size), f"{size} bytes; its placement says {claimed}")
    need(size >= 48, "shorter than a trailer")
    trailer = read(root, key, size - 48, 48)
    length = int.from_bytes(trailer[:8], "little")
    need(length <= size - 48, f"its table claims {length} bytes")
    table = read(root, key, size - 48 - length, length)
    need(trailer[40:] == b"HFPACK1\n", "no pack of version 1")
    need(trailer[8:40].hex() == sha256(table) == Path(key).stem, "not the table of its name")
    for row in canonical(table, "holdfast.pack/1")["chunks"]:
        _, stored, raw, codec, base, stored_digest = rows.setdefault(at, row)
        need(codec in CODECS, f"codec {codec!r}", TOO_NEW)
        fits = 0 < stored == raw and base is stored_digest is None
        fits = fits if codec == "raw" else 0 < stored < raw <= stored << 15
        need(fits, f"the row of the chunk at {at}")
        at += stored
    need(at == size - 48 - length, "its chunks do not end at its table")
    return rows


class State:
    """A state with its placement (§7): finds and reads its chunks."""

    def __init__(self, root: Path, place: Record) -> None:
        self.root, self.table = root, cache(pack_table)
        manifest_key, self.key = place["keys"]
        with reading(manifest_key):
            self.components = manifest(root, manifest_key)
        with reading(self.key):
            content = frame(read(root, self.key))
            need(sha256(content) == place["placement"], "not the content of its name")
            line, _, columns = content.partition(b"\n")
            head = canonical(line, "holdfast.placement/1", "holdfast.placement/2")
            need(head["manifest"] == place["manifest"], "the placement of another state")
            covered = head.get("components", [name for name, _, _ in self.components])
            self.kept = [part for part in self.components if part[0] in covered]
            need([name for name, _, _ in self.kept] == covered, "names of components")
            self.tensors = [one for _, _, tensors in self.kept for one in tensors]
            self.packs, count, extra = head["packs"], head["rows"], head["extra"]
            values = struct.unpack(f"<{count}I{count}Q{count}I{count}B{count}I", columns)
            self.rows = [values[row::count] for row in range(count)]
            # Rows are the chunks and lists of the manifest, those of its lists, extra ones.
            named = dict.fromkeys(x for one in self.tensors for x in one.chunks or [one.list] if x)
            self.row_of = {x: row for row, x in enumerate(extra, count - len(extra))}
            self.row_of |= {x: row for row, x in enumerate(named)}
            for one in (one for one in self.tensors if one.list):
                data = self.chunk(one.list, 32 * one.count)
                one.chunks = [data[at : at + 32].hex() for at in range(0, len(data), 32)]
            named |= dict.fromkeys(x for one in self.tensors for x in one.chunks)
            self.row_of |= {x: row for row, x in enumerate(named)}
            need(count == len(self.row_of) == len(named) + len(extra), "the number of its rows")

    def chunk(self, digest: str, length: int) -> bytes:
        """Return a chunk, verified: the XOR of a delta and the chain of its bases (§6)."""
        need(length < MAX_RECORD, "a digest list larger than the limit")
        total, link, row = 0, digest, self.row_of[digest]
        for _ in range(33):
            number, offset, stored, codec, base = self.rows[row]
            name, generation, size = self.packs[number]
            with reading(key := key_of("packs", name, generation)):
                entry = self.table(self.root, key, size)[offset]
                same = entry[:4] == [link, stored, length, CODECS[codec]]
                same &= base == (NO_BASE if entry[4] is None else self.row_of[entry[4]])
                need(same, f"its table differs from row {row} of {self.key}")
                data = read(self.root, key, offset, stored)
                need(sha256(data) == (entry[5] or link), f"the chunk at {offset} has other bytes")
                data = blosc(data, length, CODECS[codec]) if codec else data
            total, link, row = total ^ int.from_bytes(data, "little"), entry[4], base
            if base == NO_BASE:
                joined = total.to_bytes(length, "little")
                need(sha256(joined) == digest, f"chunk {digest} decodes to other bytes")
                return joined
        raise Failure(f"{self.key}: a chain of more than 32 deltas", DAMAGED)

    def bytes_of(self, one: Tensor) -> Iterator[bytes]:
        """Yield the bytes of a tensor, verified."""
        yield one.data
        for number, digest in enumerate(one.chunks):
            pieces = min(one.whole, one.rows - number % one.cuts * one.whole)
            yield self.chunk(digest, pieces * one.piece)


class Run:
    """A run: its log, whose commits are numbered, and chained by their digests (§8)."""

    def __init__(self, root: Path, name: str) -> None:
        self.name, self.over, self.commits, self.head = name, "", 0, ""
        self.places, self.actions = dict[str, Record](), list[Record]()
        for slot, file in enumerate(names_in(root / f"runs/{name}/log")):
            with reading(key := f"runs/{name}/log/{file}"):
                need(file == f"{slot:020}", f"slot {slot} of the log is missing")
                for text in json_lines(read(root, key)):
                    line = canonical(text)
                    need(line["kind"] in LINES, f"a line of kind {line['kind']!r}", TOO_NEW)
                    if line["kind"] == "place":
                        line["keys"] = [key_of(f"{x}s", line[x], line[f"{x}_generation"])
                                        for x in ("manifest", "placement")]  # fmt: skip
                        self.places[line["manifest"]] = line
                    self.over = ENDS.get(line["kind"], self.over)
                    if line["kind"] == "commit":
                        self.commit(text, line)

    def commit(self, text: bytes, line: Record) -> None:
        """Apply a commit."""
        undrop = self.over == "hidden" and line["actions"] == [{"action": "run.undrop"}]
        need(not self.over or undrop, "a commit after the end of the run")
        need([line["n"], line["run"]] == [self.commits, self.name], "another number or run")
        need(line.get("prev", "") == self.head, "the chain of commits is broken")
        for action in line["actions"]:
            need(action["action"] in ACTIONS, f"the action {action['action']!r}", TOO_NEW)
            self.over = ENDS.get(action["action"], self.over)
            self.actions.append(action | {"n": line["n"]})
        self.commits, self.head = self.commits + 1, sha256(text)

    def of(self, *names: str) -> list[Record]:
        """Return the actions with one of these names, in order."""
        return [one for one in self.actions if one["action"] in names]


def score(metrics: Record, monitor: Record) -> float:
    """Return a metric or a sum such as `mu - 3*sigma` (§21): the higher the better, or NaN."""
    term = r"(?:^|\s+([+-])\s+)(?:(\d+(?:\.\d+)?)\s*\*\s*)?(.+?)(?=\s+[+-]\s|$)"
    total = sum(float(f"{sign}{factor or 1}") * double(metrics.get(name, "7ff8000000000000"))
                for sign, factor, name in re.findall(term, monitor["metric"]))  # fmt: skip
    return -total if monitor["mode"] == "min" else total


def refs(run: Run) -> dict[str, Record]:
    """Return every name of a run (§16), without `RUN/`, and the record with its manifest."""
    checkpoints = {one["n"]: one for one in run.of("checkpoint.add")}
    for one in run.of("checkpoint.report"):
        checkpoints[one["checkpoint"]]["metrics"] |= one["metrics"]
    evicted = dict[int, bool]()
    for one in run.of("checkpoint.evict", "checkpoint.recover"):
        numbers = one.get("checkpoints") or [x["checkpoint"] for x in one["evictions"]]
        evicted |= dict.fromkeys(numbers, "evictions" in one)
    need(set(evicted) <= set(checkpoints), "an eviction of a checkpoint that is not there")
    kept = {n: one for n, one in checkpoints.items() if not evicted.get(n)}
    found = {one["manifest"]: one for one in kept.values()} | of_training(run, kept)
    tags = {one["name"]: one.get("checkpoint") for one in run.of("tag.set", "tag.remove")}
    need(set(tags) <= {one["name"] for one in run.of("tag.set")}, "a removal of a tag never set")
    found |= {f"tags/{name}": checkpoints[n] for name, n in tags.items() if n is not None}
    aside = {(n, one["manifest"]): one.get("commit_keys", {}) for n, one in checkpoints.items()}
    found |= {f"{pin['kind']}s/{pin['name']}": pin | {"commit_keys": aside.get(
        (pin.get("checkpoint"), pin["manifest"]), {})} for pin in run.of("pin.set")}  # fmt: skip
    found |= {f"pool/v{one['version']:04}": one for one in run.of("pool.promote")}
    for version in (version for one in run.of("pool.evict") for version in one["versions"]):
        del found[f"pool/v{version:04}"]
    for one in run.of("pin.set", "release.point"):
        if one.get("kind", "release") == "release":
            found["releases/latest"] = found[f"releases/{one.get('name') or one['version']}"]
    companions = {f"{ref}/companions/{name}": {"manifest": digest} for ref, one in found.items()
                  for name, digest in one.get("companions", {}).items()}  # fmt: skip
    return {} if run.over else found | companions


def of_training(run: Run, kept: dict[int, Record]) -> dict[str, Record]:
    """Return the names of live checkpoints (§9, §21): each step, latest, best."""
    line = list[Record]()
    for one in run.of("checkpoint.add", "phase.enter", "run.rewind"):
        rewound = one["action"] == "run.rewind"
        line = [x for x in line if x["n"] <= one.get("to", 0)] if rewound else [*line, one]
    live = [one for one in line if one is kept.get(one["n"])]
    newest = line[-1] if line else Record()
    pivots = {one["to_phase"]: one["n"] for one in line if "name" in one}  # §25
    created, found = run.of("run.create")[0], dict[str, Record]()
    spec = created.get("spec", {})
    declared = {phase["name"]: phase["monitors"] for phase in spec.get("phases", [])}
    for phase in ["", *dict.fromkeys(one["phase"] for one in live)]:
        at = phase and (f"phase{phase}/" if phase.isdigit() else f"{phase}/")
        found |= {f"{at}step{one['step']:08}": one for one in live if phase == one["phase"]}
        mine = [one for one in live if phase in ("", one["phase"]) and not one.get("held_back")]
        found |= {f"{at}latest": one for one in mine}  # the last one stays
        measured = phase or (newest.get("to_phase", newest.get("phase")) if declared else "")
        mine = [one for one in mine if measured in ("", one["phase"])
                and one["n"] > pivots.get(one["phase"], 0)]  # fmt: skip
        monitors = declared.get(measured) or created["monitors"] or spec.get("monitors", [])
        for monitor in reversed(monitors):  # `best` is that of the first one
            scores = [(score(one["metrics"], monitor), -one["n"], one) for one in mine]
            best = max([x for x in scores if not math.isnan(x[0])], default=None)
            names = (f"{at}best", f"{at}best/{monitor.get('name', monitor['metric'])}")
            found |= {name: best[2] for name in names if best}
    return found


def find(root: Path, ref: str) -> tuple[Run, Record]:
    """Find the run of a ref, and the record that names its state (§16)."""
    name, _, rest = ref.partition("/")
    names, exact, digits, found = names_in(root / "runs"), "", ref, dict[str, tuple[Run, Record]]()
    if name in names:
        exact = re.sub(r"/step(\d+)", lambda m: f"/step{int(m[1]):08}", f"/{rest or 'latest'}")[1:]
        names, digits = [name], rest
    wanted = re.fullmatch("[0-9a-f]{8,64}", digits)
    for run in (Run(root, one) for one in names if exact or wanted):
        known = {} if run.over else {x: {"manifest": x} for x in run.places} | refs(run)
        found |= {one["manifest"]: (run, one) for key, one in known.items() if key == exact
                  or (wanted and key in run.places and key.startswith(digits))}  # fmt: skip
    need(len(found) == 1, f"{ref}: {'several' if found else 'no'} states have this name", ABSENT)
    return found.popitem()[1]


def say(*columns: object) -> None:
    """Print a line; no character of a registry may steer a terminal."""
    text = "\t".join(map(str, columns))
    sys.stdout.write("".join(x if x.isprintable() or x == "\t" else "?" for x in text) + "\n")


def ls(root: Path) -> None:
    """List the runs, and each name in them with the id of its state."""
    for name in names_in(root / "runs"):
        run = Run(root, name)
        status = [one["status"] for one in run.of("run.status")]
        say(name, f"{run.over or ['running', *status][-1]}, {run.commits} commits")
        for ref, one in refs(run).items():
            say(f"{name}/{ref}", one["manifest"])


def extract(root: Path, ref: str, folder: str = "") -> None:
    """Write `state.json` and a file for each tensor; without a folder, print a description."""
    run, one = find(root, ref)
    need(one["manifest"] in run.places, f"{ref}: the log has no place of {one['manifest']}")
    state, keys = State(root, run.places[one["manifest"]]), one.get("commit_keys", {})
    about: Record = {"ref": ref, "id": one["manifest"], "run": run.name}
    about |= {key: one[key] for key in ("phase", "step", "version", "name") if key in one}
    about["metrics"] = {key: repr(double(digits)) for key, digits in one.get("metrics", {}).items()}
    about["meta"] = value_of(one.get("meta"), [])
    values = value_of(keys.get("values", {"d": []}), [])  # keys outside the manifest (§20)
    order = keys.get("order", [name for name, _, _ in state.components])
    given_up = sorted(part[0] for part in state.components if part not in state.kept)  # §22
    if not folder:
        tensors = {name: [x.about for x in part] for name, _, part in state.components}
        about |= {"commit_keys": values, "order": order, "given_up": given_up, "tensors": tensors}
        sys.stdout.write(json.dumps(about, indent=1) + "\n")
        return
    need(not ((to := Path(folder)).is_file() or names_in(to)), f"{folder}: no empty folder", WRONG)
    to.mkdir(parents=True, exist_ok=True)
    for number, tensor in enumerate(state.tensors):
        form = DTYPES[tensor.dtype]
        name = f"{number:06}.{'bin' if 'V' in form else 'npy'}"
        tensor.about = {"file": name} | tensor.about
        with (to / name).open("xb") as file:
            if "V" not in form:  # the header of NumPy's format 1.0 ends at a multiple of 64 bytes
                shape = "".join(f"{length}, " for length in tensor.shape)
                head = f"{{'descr': {form!r}, 'fortran_order': False, 'shape': ({shape}), }}"
                head += " " * (-(len(head) + 11) % 64) + "\n"
                file.write(b"\x93NUMPY\1\0" + struct.pack("<H", len(head)) + head.encode())
            file.writelines(state.bytes_of(tensor))
    values |= {x: value_of(value, list(enumerate(part))[::-1]) for x, value, part in state.kept}
    about |= {"given_up": given_up, "state": {x: values[x] for x in order if x in values}}
    (to / "state.json").write_text(json.dumps(about, indent=1) + "\n")
    say(f"{len(state.tensors)} tensors in {folder}")


def verify(root: Path) -> None:
    """Check every file, every log, and all chunks of the states that are there or needed."""
    problems, states, names = list[Failure](), 0, names_in(root / "runs")
    every = [path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()]
    keys = sorted(key for key in every if not key.startswith((".tmp/", ".probe/")))
    for key in keys:
        with reading(key, problems):
            check_file(root, key)
    for name in names:
        with reading(f"runs/{name}", problems):
            run = Run(root, name)
            needed = {one["manifest"]: ref for ref, one in reversed(refs(run).items())}
            for digest in needed | run.places:
                place = run.places.get(digest, {"keys": []})
                if digest in needed or all((root / key).is_file() for key in place["keys"]):
                    states += 1
                    with reading(f"{name}/{needed.get(digest, digest)}", problems):
                        need(digest in run.places, "the log has no place of it")
                        for one in (state := State(root, place)).tensors:
                            need(sum(map(len, state.bytes_of(one))) == one.size, "its length")
    for problem in problems:
        say("error:", problem.args[0])
    need(not problems, f"{len(problems)} errors", max((x.args[1] for x in problems), default=0))
    say(f"ok: {len(names)} runs, {states} states, {len(keys)} files")


def check_file(root: Path, key: str) -> None:
    """Check one file by itself (§1)."""
    kind, (digest, _, _) = key.split("/")[0], key.split("/")[-1].partition(".")
    if kind == "packs":
        for offset, row in pack_table(root, key).items():
            same = sha256(read(root, key, offset, row[1])) == (row[5] or row[0])
            need(same, f"the chunk at {offset} has other bytes")
    elif kind == "manifests":
        manifest(root, key)
    elif kind in ("placements", "notes"):
        need(sha256(frame(read(root, key))) == digest or kind == "notes", "not what its name says")
    elif kind == "sweeps":  # a table, or a shard: an index with digests of blocks, and these (§10)
        data = read(root, key)
        count = -(-len(data) // 16_040)
        blocks = [data[at : at + 16_000] for at in range(40 * count, len(data), 16_000)]
        index = b"".join(block[:8] + hashlib.sha256(block).digest() for block in blocks)
        shard = data.startswith(index) and sha256(index) == digest
        need(shard or sha256(data) == digest, "neither a table nor a shard of this name")
    elif kind == "active":
        need(re.fullmatch(r"active/.+\.\d+", key) and not read(root, key), "no marker")
    else:
        known = r"registry\.json|(runs/[^/]+/(log|snapshots)|epochs)/\d{20}|signatures/.+"
        need(re.fullmatch(known, key), "no file of a registry")
        before = root / f"epochs/{int(digest) - 1:020}" if kind == "epochs" else root
        need(before.exists() or int(digest) == 1, "the entry before it is missing")
        for one in map(canonical, json_lines(read(root, key))):
            need(kind != "signatures" or key == "signatures/{run}/{n:020}.{key}".format(**one),
                 "a signature under another name")  # fmt: skip


def main(arguments: list[str]) -> int:
    """Run a command."""
    commands = {("ls", 2): ls, ("verify", 2): verify, ("show", 3): extract, ("extract", 4): extract}
    command: Any = commands.get((" ".join(arguments[1:2]), len(arguments)))
    try:
        need(command, "usage: read_registry.py FOLDER ls | show REF | verify | extract REF DIR", 2)
        root = Path(arguments[0])
        with reading(arguments[0]):
            need((root / "registry.json").is_file(), "no registry is here", ABSENT)
            with reading("registry.json"):
                canonical(json_lines(read(root, "registry.json"))[0], "holdfast.registry/1")
            command(root, *arguments[2:])
    except (Failure, OSError) as error:
        sys.stderr.write(f"error: {error.args[0] if isinstance(error, Failure) else error}\n")
        return error.args[1] if isinstance(error, Failure) else DISK
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
