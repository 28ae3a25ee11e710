"""Hostile files of NumPy, a rule of the format each."""

from __future__ import annotations

import io
import os
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest

from holdfast.backends import limits
from holdfast.registry import formats
from holdfast.registry.errors import IncompatibleState
from tests.formats.hostile.refusing import Refuse


class Trap:
    """An object whose unpickling leaves a trace."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch trapped",)


def array(header: bytes, data: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    form = "<H" if version == b"\x01\x00" else "<I"
    return b"\x93NUMPY" + version + struct.pack(form, len(header)) + header + data


def described(dtype: str, shape: str, data: bytes = b"") -> bytes:
    text = f"{{'descr': {dtype}, 'fortran_order': False, 'shape': {shape}}}\n"
    return array(text.encode(), data)


SOUND = described("'<f4'", "(2,)", bytes(8))


def archive(*entries: tuple[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", method) as file:
        for name, data in entries:
            file.writestr(name, data)
    return made.getvalue()


def patched(data: bytes, at: int, value: bytes, sign: bytes = b"PK\x01\x02") -> bytes:
    """Change bytes of the directory's first entry, or of another record."""
    start = data.rindex(sign) + at
    return data[:start] + value + data[start + len(value) :]


def objects() -> bytes:
    made = io.BytesIO()
    np.savez(made, w=np.array([Trap()], dtype=object))
    return made.getvalue()


def twice() -> bytes:
    with pytest.warns(UserWarning, match="Duplicate"):
        return archive(("w.npy", SOUND), ("w.npy", SOUND))


def flipped() -> bytes:
    data = bytearray(archive(("w.npy", described("'<f4'", "(5000,)", bytes(20_000)))))
    data[data.index(b"PK\x01\x02") - 1] ^= 1
    return bytes(data)


SAMPLES = {
    "empty": (b"", "damaged archive"),
    "no zip": (b"nonsense" * 99, "damaged archive"),
    "cut": (archive(("w.npy", SOUND))[:-30], "damaged archive"),
    "objects": (objects(), "running code"),
    "objects inside fields": (
        archive(("w.npy", described("[('a', '|O')]", "(1,)", bytes(8)))),
        "running code",
    ),
    "text": (archive(("w.npy", described("'<U4'", "(1,)", bytes(16)))), "cannot be stored"),
    "fields": (archive(("w.npy", described("[('a', '<f4')]", "(1,)", bytes(4)))), "cannot be"),
    "no array": (archive(("w.pkl", b"cos\nsystem\n(S'touch x'\ntR.")), "no array"),
    "twice": (twice(), "there twice"),
    "another method": (archive(("w.npy", SOUND), method=zipfile.ZIP_BZIP2), "or packed"),
    "encrypted": (patched(archive(("w.npy", SOUND)), 8, b"\x01\x00"), "encrypted or packed"),
    "longer than stored": (
        patched(archive(("w.npy", SOUND)), 24, struct.pack("<L", 2**31)),
        "cannot be that long",
    ),
    "longer than deflate": (
        patched(
            archive(("w.npy", SOUND), method=zipfile.ZIP_DEFLATED), 24, struct.pack("<L", 2**31)
        ),
        "cannot be that long",
    ),
    "shape beyond the entry": (archive(("w.npy", described("'<f4'", "(2**9,)"))), "damaged header"),
    "huge shape": (
        archive(("w.npy", described("'<f4'", "(999999999999,)", bytes(8)))),
        "does not fill",
    ),
    "too short": (archive(("w.npy", described("'<f4'", "(1,)", bytes(8)))), "does not fill"),
    "negative axis": (archive(("w.npy", described("'<f4'", "(-2,)", bytes(8)))), "bad shape"),
    "many axes": (
        archive(("w.npy", described("'<f4'", f"({'1,' * 100})", bytes(4)))),
        "bad shape",
    ),
    "code for a header": (
        archive(("w.npy", array(b"__import__('os').system('touch trapped')\n"))),
        "damaged header",
    ),
    "deep header": (archive(("w.npy", array(b"(" * 9000 + b"\n"))), "damaged header"),
    "long header": (
        archive(("w.npy", array(b" " * 70_000, version=b"\x02\x00"))),
        "damaged header",
    ),
    "unknown version": (
        archive(("w.npy", array(b"{}", version=b"\x09\x00"))),
        "damaged header|unk",
    ),
    "wrong checksum": (flipped(), "damaged data"),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_refused(
    name: str, tmp_path: Path, refuse: Refuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, message = SAMPLES[name]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.npz").write_bytes(data)
    refuse(tmp_path / "x.npz", message)
    assert formats.validate(tmp_path / "x.npz")
    assert not (tmp_path / "trapped").exists()


def test_overlapping_entries_are_refused(tmp_path: Path, refuse: Refuse) -> None:
    """Many names for the same bytes would make a small file a large state."""
    data = archive(("a.npy", described("'<f4'", "(1000,)", bytes(4000))))
    start = data.index(b"PK\x01\x02")
    entry = data[start : data.index(b"PK\x05\x06")]
    entries = b"".join(entry.replace(b"a.npy", b"%c.npy" % (97 + n)) for n in range(20))
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 20, 20, len(entries), start, 0)
    (tmp_path / "x.npz").write_bytes(data[:start] + entries + end)
    refuse(tmp_path / "x.npz", "the entries overlap")


def test_a_directory_that_would_fill_the_memory_is_not_listed(
    tmp_path: Path, refuse: Refuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.npz").write_bytes(archive(*((f"{n}.npy", SOUND) for n in range(2000))))
    monkeypatch.setenv(limits.VARIABLE, "1000000")
    refuse(tmp_path / "x.npz", "listing it would take too much memory")


def test_arrays_that_do_not_fit_into_memory_are_not_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez_compressed(tmp_path / "x.npz", a=np.zeros(1000), b=np.zeros(1000))
    monkeypatch.setattr("holdfast.registry.formats.source.available_bytes", lambda: 15_999)
    with pytest.raises(IncompatibleState, match="does not fit into memory"):
        formats.read(tmp_path / "x.npz")
    monkeypatch.setattr("holdfast.registry.formats.source.available_bytes", lambda: 16_000)
    assert formats.read(tmp_path / "x.npz").state["arrays"]["b"].sum() == 0


def test_every_bad_array_is_listed(tmp_path: Path) -> None:
    data = archive(
        ("a.npy", described("'<f4'", "(-2,)")),
        ("b.npy", SOUND),
        ("c.npy", described("'|O'", "(1,)")),
    )
    (tmp_path / "x.npz").write_bytes(data)
    first, second = formats.validate(tmp_path / "x.npz")
    assert "a.npy" in first
    assert "c.npy" in second
