"""`inspect` and `validate`: files that need no registry."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from holdfast.registry import formats
from holdfast.registry.formats import table, thalia
from tests.registry.cli.calling import Call, CallJson
from tests.registry.formats.test_foreign_folders import FOLDERS


@pytest.fixture
def file(tmp_path: Path) -> Path:
    torch.save({"model": {"w": torch.ones(3, 4)}, "step": 1}, tmp_path / "model.bin")
    return tmp_path / "model.bin"


def test_a_file_is_described_by_its_content(file: Path, call: Call, call_json: CallJson) -> None:
    found = call_json("file", "show", file)
    assert found == {
        "format": "torch",
        "size_bytes": file.stat().st_size,
        "header": None,
        "metadata": None,
        "tensors": [{"path": "model/w", "dtype": "float32", "shape": [3, 4]}],
    }
    assert call("file", "show", file).output.splitlines()[0] == "format  torch"
    assert call_json("file", "show", file, "--format", "opaque")["format"] == "opaque"


def test_problems_are_listed_and_end_with_a_status(
    file: Path, call: Call, call_json: CallJson, tmp_path: Path
) -> None:
    sound = {"ok": True, "problems": [], "format": "torch"}
    assert call_json("file", "check", file) == sound
    assert call("file", "check", file).output == "ok: torch, 1 array, every array was read\n"
    np.savez(tmp_path / "x.npz", a=np.array([None]), b=np.ones(3), c=np.array(["x"]))
    done = call("file", "check", tmp_path / "x.npz", status=3)
    assert [line.split(": ")[1] for line in done.output.splitlines()] == ["a.npy", "c.npy"]


def test_what_nobody_knows_is_not_called_ok(
    call: Call, call_json: CallJson, tmp_path: Path
) -> None:
    (tmp_path / "x.h5").write_bytes(b"\x89HDF")
    (tmp_path / "files").mkdir()
    (tmp_path / "files/notes.txt").write_text("x")
    for name, kind in (("x.h5", "opaque"), ("files", "tree")):
        assert call("file", "check", tmp_path / name, status=9).stdout.startswith("unknown: ")
        found = call_json("file", "check", tmp_path / name, status=9)
        assert found == {"ok": None, "problems": [], "format": None}
        asked = call("file", "check", tmp_path / name, "--format", kind).stdout
        assert asked.startswith(f"ok: {kind}, 1 ")


@pytest.mark.parametrize(
    ("kind", "needed"),
    [("hf", "model.safetensors"), ("cobre", "metadata.json"), ("zarr", "zarr.json")],
)
def test_the_content_of_a_folder_counts_for_every_command(
    kind: str, needed: str, call: Call, call_json: CallJson, tmp_path: Path
) -> None:
    folder = FOLDERS[kind](tmp_path / "folder")
    for command in ("check", "show"):
        assert call_json("file", command, folder)["format"] == kind
    assert call_json("push", folder, "one", "--create", "--step", 1)["format"] == kind
    assert call_json("push", folder, "one", "--artifact", "same")["format"] == kind
    call("file", "convert", folder, tmp_path / "converted", "--format", kind)
    call("pull", "one", "--to", tmp_path / "pulled", "--format", kind)
    assert formats.read(tmp_path / "pulled").format == formats.read(tmp_path / "converted").format
    (folder / needed).write_text("cut off")
    call("push", folder, "one", "--step", 2, status=3)
    assert call_json("push", folder, "one", "--step", 2, "--format", "tree")["format"] == "tree"


def test_the_content_of_a_step_file_counts_and_its_name_must_fit(
    call: Call, call_json: CallJson, tmp_path: Path
) -> None:
    step = tmp_path / "step_000102.bin"
    part = np.arange(13, dtype=np.float32)
    formats.write(step, {"step": 102, "weights": part, "m": part, "v": part}, format="andrea")
    assert call("file", "check", step).stdout == "ok: andrea, 3 arrays, sizes fit\n"
    pushed = call_json("push", step, "steps", "--create", "--step", 102)
    assert pushed["format"] == "andrea"
    call("pull", "steps", "--to", tmp_path / "step_000103.bin")
    whole = step.read_bytes()
    assert (tmp_path / "step_000103.bin").read_bytes() == whole
    for data in (whole[:-1], b"something else"):
        step.write_bytes(data)
        assert "not a step file" in call("file", "check", step, status=3).stdout
        assert "not a step file" in call("push", step, "steps", "--step", 1, status=3).stderr
    call("push", step, "steps", "--step", 1, "--format", "opaque")
    step.with_name("weights.dat").write_bytes(whole)
    assert formats.read(step.with_name("weights.dat")).format == "andrea"


def test_a_file_is_written_in_another_form(tmp_path: Path, call: Call, call_json: CallJson) -> None:
    weights = np.tile(np.arange(500, dtype=np.float32), 40)
    thalia.save(tmp_path / "a.thalia", {"regions": {"cortex": {"weights": {"w": weights}}}})
    sizes = []
    for level in (1, 19):
        target = tmp_path / f"{level}.thalia.zst"
        done = call_json("file", "convert", tmp_path / "a.thalia", target, "--level", level)
        assert done == {
            "path": str(target),
            "format": "thalia",
            "size_bytes": target.stat().st_size,
        }
        sizes.append(target.stat().st_size)
        state = formats.read(target, portable=True).state
        assert state["regions"]["cortex"]["weights"]["w"].data == weights.tobytes()
    assert sizes[0] > sizes[1]
    halved = [tmp_path / "19.thalia.zst", tmp_path / "half.thalia", "--precision", "fp16"]
    half = ["file", "convert", *halved]
    assert "wrote: " in call(*half).output
    tensor = formats.inspect(tmp_path / "half.thalia").tensors["regions/cortex/weights/w"]
    assert tensor.dtype == "float16"
    older = [tmp_path / "half.thalia", tmp_path / "old.thalia", "--to-version", "0.1"]
    old = ["file", "convert", *older]
    call(*old)
    tensor = formats.inspect(tmp_path / "old.thalia").tensors["regions/cortex/weights/w"]
    assert tensor.dtype == "float32"
    assert "version" in call(*old[:-1], "1.0", "--force", status=8).stderr
    call("file", "convert", tmp_path / "a.thalia", tmp_path / "a.pt")
    assert list(torch.load(tmp_path / "a.pt")["regions"]) == ["cortex"]
    call("file", "convert", tmp_path / "a.thalia", tmp_path / "b.pt", "--level", 3, status=3)
    call(*old, "--level", 3, "--force", status=3)
    call("file", "convert", tmp_path / "a.thalia", tmp_path / "a.pt", status=3)  # it exists
    call("file", "convert", tmp_path / "a.thalia", tmp_path / "c.pt", "--max-bytes", 99, status=3)


def test_a_size_limit_is_an_option_and_a_variable(
    file: Path, call: Call, call_json: CallJson, monkeypatch: pytest.MonkeyPatch
) -> None:
    for command in (
        ["file", "show", file],
        ["push", file, "demo", "--step", 9, "--format", "torch"],
        ["push", file, "demo", "--artifact", "x"],
    ):
        assert "larger than the size limit" in call(*command, "--max-bytes", 10, status=3).stderr
        monkeypatch.setenv("HOLDFAST_MAX_FILE_BYTES", "10")
        assert "HOLDFAST_MAX_FILE_BYTES" in call(*command, status=3).stderr
        monkeypatch.delenv("HOLDFAST_MAX_FILE_BYTES")
    assert "size limit" in call("file", "check", file, "--max-bytes", 10, status=3).stdout
    assert call("file", "check", file, "--max-bytes", 100_000).stdout.startswith("ok: ")


def test_the_help_names_every_format(call: Call) -> None:
    text = " ".join(call("push", "--help").output.split())
    assert all(one in text for one in table.EXTENSIONS.split(", "))
    text = " ".join(call("pull", "--help").output.split())
    assert all(one.extensions[0] in text for one in table.FORMATS if one.extensions)
