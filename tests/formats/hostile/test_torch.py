"""Hostile files of torch."""

from __future__ import annotations

import argparse
import contextlib
import os
import pickle
import random
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.backends import limits
from holdfast.registry import formats
from holdfast.registry.errors import UnsupportedValue
from tests.formats.hostile.refusing import Refuse
from tests.support.foreign import Calls


def sound() -> dict[str, Any]:
    return {"model": {"w": torch.arange(1000.0)}, "epoch": 3}


def repack(
    path: Path, *, replace: dict[str, bytes] | None = None, compress: int = zipfile.ZIP_STORED
) -> None:
    """Write an archive again with entries replaced or added."""
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    folder = next(iter(entries)).partition("/")[0]
    entries |= {f"{folder}/{name}": data for name, data in (replace or {}).items()}
    with zipfile.ZipFile(path, "w", compress) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)


@pytest.mark.parametrize("function", [os.system, eval, os.mkdir])
def test_a_call_is_named_and_not_made(function: Any, tmp_path: Path, refuse: Refuse) -> None:
    sentinel = tmp_path / "sentinel"
    argument = {
        os.system: f"touch {sentinel}",
        eval: f"__import__('os').mkdir({str(sentinel)!r})",
        os.mkdir: str(sentinel),
    }[function]
    torch.save({**sound(), "x": Calls(function, argument)}, tmp_path / "x.pt")
    error = refuse(tmp_path / "x.pt", function.__name__)
    assert isinstance(error, UnsupportedValue)
    assert not sentinel.exists()
    # The file is as dangerous as it looks.
    torch.load(tmp_path / "x.pt", weights_only=False)
    assert sentinel.exists()


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (argparse.Namespace(lr=0.1), r"argparse\.Namespace"),
        (torch.nn.Linear(2, 2), r"torch\.nn\.modules\.linear\.Linear"),
        (random.Random, r"random\.Random"),
    ],
)
def test_an_unknown_global_is_named(
    value: object, name: str, tmp_path: Path, refuse: Refuse
) -> None:
    torch.save({"x": value}, tmp_path / "x.pt")
    error = refuse(tmp_path / "x.pt", name)
    assert "Nothing in it was run" in str(error)
    assert "opaque" in str(error)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.9, 0.999])
def test_truncated(share: float, tmp_path: Path, refuse: Refuse) -> None:
    torch.save(sound(), tmp_path / "x.pt")
    data = (tmp_path / "x.pt").read_bytes()
    (tmp_path / "x.pt").write_bytes(data[: int(len(data) * share)])
    refuse(tmp_path / "x.pt", "not a sound torch file|not a file of torch|an empty file")


def test_flipped_bytes_never_run_or_crash(tmp_path: Path, refuse: Refuse) -> None:
    from holdfast import RegistryError
    from holdfast.registry import formats

    torch.save(sound(), tmp_path / "x.pt")
    data = (tmp_path / "x.pt").read_bytes()
    chosen = random.Random(7)
    for _ in range(60):
        broken = bytearray(data)
        broken[chosen.randrange(len(broken))] ^= 1 << chosen.randrange(8)
        (tmp_path / "y.pt").write_bytes(broken)
        with contextlib.suppress(RegistryError):
            formats.read(tmp_path / "y.pt")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_bare_pickles(protocol: int, tmp_path: Path, refuse: Refuse) -> None:
    sentinel = tmp_path / "sentinel"
    evil = Calls(os.mkdir, str(sentinel))
    (tmp_path / "x.pt").write_bytes(pickle.dumps(evil, protocol=protocol))
    refuse(tmp_path / "x.pt", "bare pickle")
    assert not sentinel.exists()


def test_formats_of_old(tmp_path: Path, refuse: Refuse) -> None:
    (tmp_path / "pickle").write_bytes(b"x")
    with tarfile.open(tmp_path / "y.pth", "w", format=tarfile.USTAR_FORMAT) as archive:
        archive.add(tmp_path / "pickle", "pickle")
    refuse(tmp_path / "y.pth", "tar archive")
    (tmp_path / "z.ckpt").write_bytes(b"TensorFlow")
    refuse(tmp_path / "z.ckpt", "not a file of torch.save")


def test_torchscript(tmp_path: Path, refuse: Refuse) -> None:
    torch.save(sound(), tmp_path / "x.pt")
    repack(tmp_path / "x.pt", replace={"constants.pkl": b"", "code/__torch__.py": b"def f(): 1"})
    refuse(tmp_path / "x.pt", "TorchScript")


def test_another_archive(tmp_path: Path, refuse: Refuse) -> None:
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        archive.writestr("readme.txt", "hello")
    refuse(tmp_path / "x.pt", r"not an archive of torch\.save")


def test_a_compressed_archive(tmp_path: Path, refuse: Refuse) -> None:
    torch.save({"model": torch.zeros(5_000_000)}, tmp_path / "x.pt")
    repack(tmp_path / "x.pt", compress=zipfile.ZIP_DEFLATED)
    assert (tmp_path / "x.pt").stat().st_size < 100_000
    refuse(tmp_path / "x.pt", "compressed")


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_an_entry_twice(tmp_path: Path, refuse: Refuse) -> None:
    torch.save(sound(), tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt", "a") as archive:
        archive.writestr("x/data.pkl", pickle.dumps({}, protocol=2))
    refuse(tmp_path / "x.pt", "ambiguous")


def test_a_vast_view_of_few_bytes(tmp_path: Path, refuse: Refuse) -> None:
    torch.save({"w": torch.ones(1).expand(10**6, 10**6)}, tmp_path / "x.pt")
    refuse(tmp_path / "x.pt", "far larger than the file")


def test_a_wide_view_that_fits_is_read(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1).expand(1000, 1000)}, tmp_path / "x.pt")
    assert formats.read(tmp_path / "x.pt").state["w"].sum() == 10**6


def test_a_pickle_of_more_objects_than_memory(
    tmp_path: Path, refuse: Refuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"x": [[]]}, tmp_path / "x.pt")
    lists = b"\x80\x02}X\x01\0\0\0x](" + b"]" * 100_000 + b"es."
    repack(tmp_path / "x.pt", replace={"data.pkl": lists})
    assert len(formats.read(tmp_path / "x.pt").state["x"]) == 100_000
    monkeypatch.setenv(limits.VARIABLE, "1000000")
    refuse(tmp_path / "x.pt", "unpickling it would take too much memory")


def test_lists_of_lists_that_unfold(tmp_path: Path, refuse: Refuse) -> None:
    value: list[Any] = [1]
    for _ in range(60):
        value = [value, value]
    torch.save({"x": value}, tmp_path / "x.pt")
    refuse(tmp_path / "x.pt", "too many values")


def test_a_list_within_itself(tmp_path: Path, refuse: Refuse) -> None:
    value: list[Any] = []
    value.append(value)
    torch.save({"x": value}, tmp_path / "x.pt")
    refuse(tmp_path / "x.pt", "within itself")
