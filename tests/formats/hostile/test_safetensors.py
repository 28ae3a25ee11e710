"""Hostile files of safetensors, a rule of the format each."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from holdfast.backends import limits
from tests.formats.hostile.refusing import Refuse

F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def build(header: object, data: bytes = b"", *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(**changed: Any) -> dict[str, Any]:
    return {"w": {**F32, **changed}}


SAMPLES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "shorter than"),
    "seven bytes": (b"1234567", "shorter than"),
    "header beyond the file": (build(entry(), bytes(8), length=5000), "longer than the file"),
    "header beyond the cap": (build(entry(), length=2**40), "too long"),
    "header of 2^64 - 1": (build(entry(), length=2**64 - 1), "too long"),
    "not JSON": (build(b"{nonsense", bytes(8)), "not JSON"),
    "not UTF-8": (build(b'{"\xff": 1}', bytes(8)), "not JSON"),
    "deep JSON": (build(b"[" * 200_000), "not JSON"),
    "not an object": (build([1, 2]), "no object"),
    "a name twice": (
        build(b'{"w":%s,"w":%s}' % ((json.dumps(F32).encode(),) * 2), bytes(8)),
        "is there twice",
    ),
    "overlap": (
        build({"a": F32, "b": {**F32, "data_offsets": [4, 12]}}, bytes(12)),
        "overlaps another",
    ),
    "same place": (build({"a": F32, "b": F32}, bytes(8)), "overlaps another"),
    "hole": (build({"a": F32, "b": {**F32, "data_offsets": [16, 24]}}, bytes(24)), "hole"),
    "hole at the front": (build(entry(data_offsets=[8, 16]), bytes(16)), "hole"),
    "hole at the end": (build(entry(), bytes(9)), "do not end with the file"),
    "data beyond the file": (build(entry(), bytes(4)), "do not end with the file"),
    "offsets reversed": (build(entry(data_offsets=[8, 0]), bytes(8)), "does not fit"),
    "negative offset": (build(entry(data_offsets=[-8, 0]), bytes(8)), "bad numbers"),
    "negative axis": (build(entry(shape=[-2]), bytes(8)), "bad numbers"),
    "float axis": (build(entry(shape=[2.0]), bytes(8)), "bad numbers"),
    "bool axis": (build(entry(shape=[True]), bytes(8)), "bad numbers"),
    "huge shape": (build(entry(shape=[2**62, 2**62]), bytes(8)), "does not fit"),
    "huge shape times nothing": (
        build(entry(shape=[2**63, 0], data_offsets=[0, 0])),
        "bad numbers",
    ),
    "an integer beyond all": (build(b'{"w":{"x":' + b"9" * 5000 + b"}}"), "not JSON|bad entry"),
    "unknown dtype": (build(entry(dtype="F4"), bytes(8)), "F4"),
    "dtype of no name": (build(entry(dtype=7), bytes(8)), "bad entry"),
    "field missing": (build({"w": {"dtype": "F32"}}), "bad entry"),
    "field too many": (build(entry(code="x"), bytes(8)), "unknown fields"),
    "many axes": (build(entry(shape=[2] + [1] * 100), bytes(8)), "bad numbers"),
    "metadata of numbers": (
        build({"__metadata__": {"a": 1}, **entry()}, bytes(8)),
        "not text by name",
    ),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_refused(name: str, tmp_path: Path, refuse: Refuse) -> None:
    data, message = SAMPLES[name]
    (tmp_path / "x.safetensors").write_bytes(data)
    refuse(tmp_path / "x.safetensors", message)


def test_the_sound_one_passes(tmp_path: Path) -> None:
    from holdfast.registry import formats

    (tmp_path / "x.safetensors").write_bytes(build(entry(), bytes(8)))
    assert formats.read(tmp_path / "x.safetensors").state["model"]["w"].tolist() == [0.0, 0.0]


def metadata(pairs: list[bytes]) -> bytes:
    return build(b'{"__metadata__":{%b}}' % b",".join(pairs))


def test_a_key_that_stands_twice_among_many_is_found(tmp_path: Path, refuse: Refuse) -> None:
    """Each key is looked at once: by pairs this would take hours."""
    pairs = [b'"%d":""' % number for number in range(400_000)]
    (tmp_path / "x.safetensors").write_bytes(metadata([*pairs, pairs[-1]]))
    refuse(tmp_path / "x.safetensors", "'399999' is there twice")


def test_a_header_that_would_fill_the_memory_is_not_parsed(
    tmp_path: Path, refuse: Refuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.safetensors").write_bytes(build(b"[%b]" % b",".join([b"[]"] * 100_000)))
    refuse(tmp_path / "x.safetensors", "the header is no object")
    monkeypatch.setenv(limits.VARIABLE, "1000000")
    message = "parsing it would take too much memory.*" + limits.VARIABLE
    refuse(tmp_path / "x.safetensors", message)
