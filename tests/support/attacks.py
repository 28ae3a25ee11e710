"""Small files that make a careless reader take memory or time out of all proportion.

Each is made by a function of a number: the larger it is, the worse the file. The tests read large
ones; the fuzz targets begin with small ones.
"""

from __future__ import annotations

import hashlib
import io
import json
import struct
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgpack
import zstandard

from holdfast.registry.formats.thalia.framing import DELTA_MAGIC, ENTRY_BYTES, HEADER_BYTES, Header

MERSENNE = 2**61 - 1
_END = b"."
_DEQUE = b"ccollections\ndeque\n"
_ORDERED = b"ccollections\nOrderedDict\n"
_PATH = b"cpathlib\nPurePosixPath\n"


def _int(value: int) -> bytes:
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8b" + struct.pack("<I", len(data)) + data


def _text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def _complex(k: int) -> bytes:
    parts = struct.pack(">d", -1000003.0 * k), struct.pack(">d", float(k))
    return b"h\x01G" + parts[0] + b"G" + parts[1] + b"\x86R"


def _tower(count: int) -> bytes:
    """Return a tuple of tuples of tuples ..., each of the same one again and again."""
    level = b"(" + b"N" * 8 + b"tq\x02"
    return level + (b"(" + b"h\x02" * max(8, count // 100) + b"tq\x02") * 5


def _wide(count: int) -> bytes:
    """Return a text in the memo as 2."""
    return _text("x" * (count * 5)) + b"q\x02"


#: Values of a pickle, each within two dicts.
PICKLED: dict[str, Callable[[int], bytes]] = {
    "sets": lambda n: b"(" + b"\x8f" * (n * 4) + b"l",
    "dicts": lambda n: b"(" + b"}" * (n * 4) + b"l",
    "deques": lambda n: _DEQUE + b"q\x02(" + b"h\x02)R" * n + b"l",
    "popped": lambda n: _ORDERED + b"q\x02" + b"h\x02)R0" * n + b"0N",
    "memo": lambda n: b"N" + b"\x94" * (n * 8),
    "longkey": lambda n: b"}" + _wide(n) + b"(" + b"N" * n + b"ls",
    "ints": lambda n: b"}(" + b"".join(_int(k * MERSENNE) + b"N" for k in range(n // 2)) + b"u",
    "ints-one-by-one": lambda n: b"}" + b"".join(_int(k * MERSENNE) + b"Ns" for k in range(n // 2)),
    "int-set": lambda n: b"\x8f(" + b"".join(_int(k * MERSENNE) for k in range(n // 2)) + b"\x90",
    "frozen": lambda n: b"(" + b"".join(_int(k * MERSENNE) for k in range(n // 2)) + b"\x91",
    "complex": lambda n: (
        b"cbuiltins\ncomplex\nq\x010}(" + b"".join(_complex(k) + b"N" for k in range(n // 2)) + b"u"
    ),
    "tuples": lambda n: (
        b"}(" + b"".join(_int(k * MERSENNE) + b"\x85N" for k in range(n // 2)) + b"u"
    ),
    "tower": lambda n: b"}" + _tower(n) + b"Ns",
    "wide-int": lambda n: _int(1 << n * 16) + b"q\x02(" + b"}h\x02Ns" * n * 2 + b"l",
    "paths": lambda n: _wide(n) + b"0" + _PATH + b"(" + b"h\x02" * (n // 100) + b"tR",
}


def pickled(name: str, count: int) -> bytes:
    """Return a pickle with a dict."""
    head = b"\x80\x04}" + _text("regions")
    return head + b"}" + _text("a") + b"}" + _text("b") + PICKLED[name](count) + b"sss" + _END


def archive(pickle: bytes) -> bytes:
    """Return a file of torch."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as new:
        new.writestr("a/data.pkl", pickle)
    return made.getvalue()


def delta(pickle: bytes) -> bytes:
    """Return a delta of Thalia, compressed."""
    head = struct.pack("<5sI32sQQ7s", DELTA_MAGIC, 1, bytes(32), 0, 1, bytes(7))
    info = json.dumps({"delta_info": {"base_checkpoint": "none.thalia"}}).encode()
    return zstandard.compress(head + pickle + struct.pack("<I", len(info)) + info)


def thalia(region: bytes, more: bytes = b"") -> bytes:
    """Return a file of Thalia with one region, and bytes from offset 256 on."""
    metadata, at = b"{}", HEADER_BYTES + len(more)
    entry = struct.pack("<32sQQ", b"c", at + 2, len(region))
    assert len(entry) == ENTRY_BYTES
    header = Header(
        metadata_offset=at,
        metadata_length=2,
        index_offset=at + 2 + len(region),
        index_length=ENTRY_BYTES,
        num_regions=1,
    )
    body = header.pack() + more + metadata + region + entry
    return body + hashlib.sha256(body).digest()


def _regions(value: str, count: int) -> bytes:
    tensor = struct.pack("<IIII", 0, 0, 1, 1) + bytes(4)
    inner = ",".join(f'"{n}":{value}' for n in range(count))
    return thalia(b'{"%b":{%b}}' % (b"k" * count * 5, inner.encode()), tensor)


def safetensors(text: bytes) -> bytes:
    """Return a file with this header."""
    return struct.pack("<Q", len(text)) + text


def _names(value: bytes, count: int) -> bytes:
    return b"{" + b",".join(b'"%d":%b' % (n, value) for n in range(count)) + b"}"


def burn(item: object) -> bytes:
    """Return a record."""
    keys = ("float", "int", "format", "version", "settings")
    return bytes(msgpack.packb({"metadata": dict.fromkeys(keys, "x"), "item": item, "_b": None}))


def _burnt(value: object, count: int) -> bytes:
    return burn({"k" * count * 5: [value] * count})


_BURNT = {"bytes": bytes(4), "shape": [1], "dtype": "F32"}


def listing(count: int) -> bytes:
    """Return a zip archive of empty entries whose directory is long; its end has its own sign."""
    one = struct.pack("<4s6H3I5H2I", b"PK\1\2", *[20] * 2, *[0] * 7, 1, *[0] * 6) + b"a"
    directory = one * count
    size = struct.pack("<I", len(directory))
    return (
        directory
        + b"PK\5\6"
        + bytes(4)
        + struct.pack("<HH", *[count % 65536] * 2)
        + size
        + bytes(6)
    )


def hidden(count: int) -> bytes:
    """Return the same with `PK\5\6` in the counters of its end, which tell no length then."""
    plain = listing(count)
    return plain[:-18] + b"PK\5\6" + plain[-14:-12] + plain[-12:]


def _packed(container: Callable[[bytes], bytes], name: str, count: int) -> bytes:
    return container(pickled(name, count))


#: File name -> its bytes, given the number.
FILES: dict[str, Callable[[int], bytes]] = {
    **{f"{name}.pt": partial(_packed, archive, name) for name in PICKLED},
    **{
        f"{name}.delta.thalia.zst": partial(_packed, delta, name)
        for name in PICKLED
        if name not in ("deques", "complex", "ints-one-by-one", "paths")
    },
    "longkey.thalia": lambda n: _regions("0", n),
    "longkey-tensors.thalia": lambda n: _regions('{"_type":"tensor","_offset":256}', n // 10),
    "faults.thalia": lambda n: _regions('{"_type":"tensor","_offset":9}', n // 10),
    "faults.safetensors": lambda n: safetensors(_names(b"0", n)),
    "longkey.mpk": lambda n: _burnt(0, n),
    "longkey-tensors.mpk": lambda n: _burnt(_BURNT, n // 10),
    "faults.mpk": lambda n: burn([_BURNT | {"shape": [2]}] * (n // 4)),
    "maps.mpk": lambda n: burn([{}] * n),
    "listing.npz": lambda n: listing(n),
    "hidden.npz": lambda n: hidden(n),
    "listing": lambda n: listing(n),
    "hidden": lambda n: hidden(n),
}


def planted(name: str, count: int, folder: Path) -> Path:
    """Write one of the files."""
    (folder / name).write_bytes(FILES[name](count))
    return folder / name
