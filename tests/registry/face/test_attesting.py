"""`Registry.attest`: whose bytes a file has, by digests alone."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from holdfast.backends.wrappers import Call, Metered
from holdfast.errors import InvalidInput, UnsupportedValue
from holdfast.registry import formats
from holdfast.registry.face import Registry, attesting
from holdfast.registry.formats import digesting
from holdfast.registry.layouts import hub_folder
from tests.support.stores import new_backend, opened, small_grid

Writer = Callable[[Path], Path]
_WIDE = {"weight": torch.randn(2000, 1500), "bias": torch.randn(7), "n": torch.tensor(3)}


@pytest.fixture
def reg(tmp_path: Path) -> Registry:
    return holdfast.init(tmp_path / "reg", skip_race_probe=True)


def save(reg: Registry, run: str, *states: dict[str, Any]) -> list[Any]:
    opened = reg.run(run, create=True)
    return [opened.save(state, step=step) for step, state in enumerate(states, 1)]


def torch_file(folder: Path) -> Path:
    odd = {"t": _WIDE["weight"].T, "e": torch.zeros(1, 3).expand(4, 3), "z": torch.zeros(0, 2)}
    state = {"model": {**_WIDE, **odd}, "opt": [{"x": torch.ones(3), "lr": 1e-3}], "b": b"z" * 9000}
    torch.save(state, folder / "f.pt")
    return folder / "f.pt"


def old_torch_file(folder: Path) -> Path:
    torch.save({"model": _WIDE}, folder / "o.pt", _use_new_zipfile_serialization=False)
    return folder / "o.pt"


def npz(folder: Path, save: Callable[..., None] = np.savez) -> Path:
    big = np.arange(1_500_000.0)
    save(
        folder / "f.npz",
        big=big.reshape(1500, 1000),
        fortran=np.asfortranarray(big[:6000].reshape(60, 100)),
        swapped=np.arange(50, dtype=">i4"),
        times=np.array(["2020-01-01"], dtype="datetime64[D]"),
        zero=np.float32(3),
    )
    return folder / "f.npz"


def compressed(folder: Path) -> Path:
    return npz(folder, np.savez_compressed)


def safetensors(folder: Path) -> Path:
    formats.write(folder / "f.safetensors", {"model": _WIDE}, {"made": "by us"})
    return folder / "f.safetensors"


def sharded(folder: Path) -> Path:
    files = {}
    for number, name in enumerate(_WIDE, 1):
        file = f"model-{number:05d}-of-00003.safetensors"
        formats.write(folder / file, {"model": {name: _WIDE[name]}})
        files[name] = file
    index = folder / "model.safetensors.index.json"
    index.write_bytes(formats.json_file("index", {"metadata": {}, "weight_map": files}))
    return index


def hf_folder(folder: Path) -> Path:
    path = folder / "hf"
    path.mkdir()
    sharded(path)
    (path / "config.json").write_text('{"hidden": 7, "rate": 0.5}')
    (path / "tokenizer.model").write_bytes(b"t" * 50_000)
    (path / "merges.txt").write_bytes(b"a b")
    torch.save({"state": {0: torch.ones(400)}, "lr": 0.1}, path / "optimizer.pt")
    return path


WRITERS = [torch_file, old_torch_file, npz, compressed, safetensors, sharded, hf_folder]


@pytest.mark.parametrize("write", WRITERS)
def test_the_digests_of_a_file_are_those_of_its_push(
    reg: Registry, tmp_path: Path, write: Writer
) -> None:
    path = write(tmp_path)
    pushed = reg.create_run("r").exchange.push(formats.read(path, portable=True).state, step=1)
    stored = pushed.handle.manifest.components
    _, parts = formats.digest(path, None, None)
    assert list(parts) == list(stored)
    for name, part in parts.items():
        assert [one.content for one in part.tensors] == [
            one.content for one in stored[name].tensors
        ]
    found = reg.attest(path)
    assert (found.ref, found.id, found.is_whole) == (pushed.ref, pushed.digest, True)
    assert found.equal_bytes == pushed.handle.manifest.nbytes
    assert (found.values, found.uncompared, found.absent) == ((), (), ())


@pytest.mark.parametrize("write", [torch_file, npz, safetensors, hf_folder])
def test_no_tensor_data_is_read_from_the_registry(tmp_path: Path, write: Writer) -> None:
    path, calls, backend = write(tmp_path), list[Call](), new_backend()
    state = formats.read(path, portable=True).state
    with small_grid(
        chunk_bytes=4096, list_threshold=4
    ):  # some tensors have stored lists of digests
        with opened(backend) as reg:
            saved = reg.create_run("r").exchange.push(state, step=1)
        assert any(one.chunk_list for one in saved.handle.manifest.tensors())
        with opened(Metered(backend, calls)) as again:
            assert again.attest(path).is_whole
            assert again.attest(path, saved.ref).is_whole
    read = {call.key.partition("/")[0] for call in calls if call.method == "get"}
    assert "manifests" in read
    assert read <= {"registry.json", "runs", "manifests", "epochs"}


@pytest.mark.parametrize("write", [torch_file, old_torch_file, npz, compressed, safetensors])
def test_a_chunk_of_the_file_is_in_memory_at_a_time(tmp_path: Path, write: Writer) -> None:
    path = write(tmp_path)
    formats.digest(path, None, None)  # what is imported stays
    tracemalloc.start()
    try:
        formats.digest(path, None, None)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Their largest tensors have 12 MB; the transposed one of the first is read whole, and copied.
    assert peak < (30e6 if write is torch_file else 11e6)


def test_it_says_which_tensors_are_changed_missing_extra_or_of_another_form(
    reg: Registry, tmp_path: Path
) -> None:
    stored = {name: torch.full((40,), float(at)) for at, name in enumerate("abcde")}
    [saved] = save(reg, "r", {"model": stored, "opt": {"lr": 0.1}})
    file = {**stored, "b": stored["b"] + 1, "c": stored["c"].half(), "d": stored["d"].view(4, 10)}
    file["f"] = file.pop("e")
    formats.write(tmp_path / "m.safetensors", {"model": file})
    for found in (
        reg.attest(tmp_path / "m.safetensors", "r"),
        reg.attest(tmp_path / "m.safetensors"),
    ):
        assert not found.is_whole
        assert (found.ref, found.id) == (saved.ref, saved.digest)
        assert found.tensors == {
            "equal": ("model/a",),
            "changed": ("model/b",),
            "other form": ("model/c", "model/d"),
            "extra": ("model/f",),
            "missing": ("model/e",),
        }
        assert (found.absent, found.equal_bytes) == (("opt",), 160)


def test_one_bit_is_a_change_and_so_is_the_sign_of_a_zero(reg: Registry, tmp_path: Path) -> None:
    save(reg, "r", {"model": {"w": np.zeros(100), "v": np.zeros(2)}})
    np.savez(tmp_path / "f.npz", w=np.zeros(100), v=np.array([0.0, -0.0]))
    found = reg.attest(tmp_path / "f.npz")
    assert found.tensors == {"equal": ("model/w",), "changed": ("model/v",)}
    assert not found.is_whole


def test_a_plain_value_that_differs_is_no_match(reg: Registry, tmp_path: Path) -> None:
    [saved] = save(reg, "r", {"opt": {"m": torch.ones(30), "lr": 0.1, "on": True}})
    same = {"opt": {"m": torch.ones(30), "lr": 0.1, "on": True}, "epoch": 3}
    torch.save(same, tmp_path / "same.pt")
    found = reg.attest(tmp_path / "same.pt", saved.ref)
    assert (found.is_whole, found.uncompared) == (True, ("epoch",))
    for lost, values in (
        ({"lr": 0.2, "on": True}, ("opt/lr",)),
        ({"lr": 0.1}, ("opt/on",)),
        ({"lr": 0.1, "on": 1}, ("opt/on",)),
        ({"lr": 0.1, "on": True, "x": None}, ("opt/x",)),
    ):
        torch.save({"opt": {"m": torch.ones(30), **lost}}, tmp_path / "f.pt")
        found = reg.attest(tmp_path / "f.pt", saved.ref)
        assert (found.is_whole, found.values) == (False, values)


def test_values_that_a_format_cannot_hold_are_named(reg: Registry, tmp_path: Path) -> None:
    [saved] = save(reg, "r", {"model": {"w": torch.ones(30), "scale": 2.0}})
    formats.write(tmp_path / "f.safetensors", {"model": {"w": torch.ones(30)}}, {"format": "pt"})
    found = reg.attest(tmp_path / "f.safetensors", saved.ref)
    assert found.is_whole
    assert found.uncompared == ("model/scale", "metadata/format")


@pytest.mark.parametrize("suffix", [".safetensors", ".npz", ".pt"])
@pytest.mark.parametrize("name", ["model", "ema"])
def test_a_pulled_component_is_found_whatever_the_file_calls_it(
    reg: Registry, tmp_path: Path, suffix: str, name: str
) -> None:
    shared = torch.ones(50)
    state = {part: {"e": shared, "w": torch.rand(60)} for part in ("model", "ema")}
    [saved] = save(reg, "r", state)
    formats.write(tmp_path / f"f{suffix}", saved, only=[name])
    found = reg.attest(tmp_path / f"f{suffix}", "r")
    assert found.is_whole
    assert found.tensors == {"equal": (f"{name}/e", f"{name}/w")}
    assert found.absent == tuple({"model", "ema"} - {name})


def test_bare_tensors_match_a_component_and_the_other_way_round(
    reg: Registry, tmp_path: Path
) -> None:
    weights = {"a": torch.rand(40), "b": torch.rand(40)}
    save(reg, "r", {"model": weights}, weights)
    torch.save(weights, tmp_path / "bare.pt")
    formats.write(tmp_path / "f.safetensors", {"model": weights})
    for file in ("bare.pt", "f.safetensors"):
        assert reg.attest(tmp_path / file, "r/main/step1").tensors == {
            "equal": ("model/a", "model/b")
        }
        found = reg.attest(tmp_path / file, "r/main/step2")
        assert (found.is_whole, found.tensors) == (True, {"equal": ("a", "b")})


def test_a_folder_that_was_exported_matches_the_checkpoint_of_a_trainer(
    reg: Registry, tmp_path: Path
) -> None:
    state = {"model": {"w": torch.rand(50)}, "configs": {"config.json": {"hidden": 7, "rate": 0.5}}}
    [saved] = save(reg, "r", {**state, "optimizer": {"m": torch.rand(9)}})
    folder = hub_folder.export(saved, tmp_path / "out")
    found = reg.attest(folder)
    assert (found.is_whole, found.absent) == (True, ("optimizer",))
    assert found.uncompared == ("metadata/model.safetensors/format", "files/README.md")
    (folder / "config.json").write_text('{"hidden": 8, "rate": 0.5}')
    found = reg.attest(folder, "r")
    assert (found.is_whole, found.values) == (False, ("configs/config.json/hidden",))


def test_a_file_in_less_precision_has_the_stored_bytes(reg: Registry, tmp_path: Path) -> None:
    run = reg.create_run("r")
    storing = holdfast.Storing(precision="bf16")
    saved = run.save({"model": {"w": torch.rand(90)}}, step=1, storing=storing)
    formats.write(tmp_path / "f.safetensors", saved)
    assert reg.attest(tmp_path / "f.safetensors", "r").is_whole


# The search


def test_the_search_begins_with_the_newest_and_stops_at_a_whole_match(
    reg: Registry, tmp_path: Path
) -> None:
    states = [{"model": {"w": torch.full((30,), float(at))}} for at in range(6)]
    save(reg, "zz-old", *states[:3])
    save(reg, "aa-new", *states[3:])
    torch.save(states[4], tmp_path / "f.pt")
    (tmp_path / "g").mkdir()
    formats.write(tmp_path / "g" / "f.npz", {"model": states[4]["model"]})  # has another id
    for file, looked_at in (("f.pt", 1), ("g/f.npz", 2)):
        found = reg.attest(tmp_path / file)
        assert (found.ref, found.is_whole) == ("aa-new/main/step00000002", True)
        assert (found.looked_at, found.left, found.unopened) == (looked_at, 6 - looked_at, 0)
    formats.write(tmp_path / "h.npz", {"model": states[0]["model"]})
    found = reg.attest(tmp_path / "h.npz", most=5)
    assert (found.ref, found.tensors, found.looked_at, found.left) == (None, {}, 5, 1)
    assert reg.attest(tmp_path / "h.npz", most=6).ref == "zz-old/main/step00000001"


def test_the_search_looks_at_releases_and_artifacts_too(reg: Registry, tmp_path: Path) -> None:
    [saved] = save(reg, "r", {"model": {"w": torch.ones(30)}})
    run = reg.run("r")
    run.releases.publish("1.0.0", saved, state={"model": {"w": torch.zeros(30)}})
    run.pins.artifacts.set("grp", {"net": {"w": torch.full((30,), 2.0)}})
    for value, ref in ((0.0, "r/releases/1.0.0"), (2.0, "r/artifacts/grp")):
        formats.write(tmp_path / "f.npz", {"x": {"w": np.full(30, value, np.float32)}}, force=True)
        found = reg.attest(tmp_path / "f.npz")
        assert (found.ref, found.is_whole) == (ref, True)


def test_a_run_or_manifest_that_cannot_be_read_is_named_and_hides_no_match(
    tmp_path: Path,
) -> None:
    backend = new_backend()
    states = [{"model": {"w": torch.full((30,), float(at))}} for at in range(3)]
    with opened(backend) as reg:
        [first] = save(reg, "a", states[0])
        [second] = save(reg, "b", states[1])
        save(reg, "c", states[2])
    backend.put(str(second.handle.reader.place.manifest_key), b"damaged")
    for key in [info.key for info in backend.list("runs/c/")]:
        backend.put(key, b"damaged")
    formats.write(tmp_path / "f.npz", {"model": states[0]["model"]})
    with opened(backend) as reg:
        found = reg.attest(tmp_path / "f.npz")
    assert (found.ref, found.is_whole) == (first.ref, True)
    assert set(found.unread) == {"c", second.ref}


def test_runs_beyond_the_first_ones_are_opened_only_if_needed(
    reg: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attesting, "_AT_ONCE", 2)
    for at in range(5):
        save(reg, f"run{at}", {"model": {"w": torch.full((30,), float(at))}})
    for at, unopened in ((4, 3), (2, 1), (0, 0)):
        formats.write(tmp_path / "f.npz", {"m": {"w": np.full(30, at, np.float32)}}, force=True)
        found = reg.attest(tmp_path / "f.npz")
        assert (found.ref, found.unopened) == (f"run{at}/main/step00000001", unopened)


# Bad input


def test_a_file_that_needs_code_is_refused_and_nothing_in_it_runs(
    reg: Registry, tmp_path: Path
) -> None:
    ran = tmp_path / "ran"

    class Code:
        def __reduce__(self) -> Any:
            return Path.touch, (ran,)

    torch.save({"model": {"w": torch.ones(30), "x": Code()}}, tmp_path / "f.pt")
    with pytest.raises(UnsupportedValue):
        reg.attest(tmp_path / "f.pt")
    assert not ran.exists()


@pytest.mark.parametrize("write", [torch_file, npz, safetensors])
def test_a_file_that_is_cut_short_is_refused(reg: Registry, tmp_path: Path, write: Writer) -> None:
    path = write(tmp_path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    with pytest.raises(InvalidInput):
        reg.attest(path, format={".pt": "torch"}.get(path.suffix, path.suffix[1:]))


def test_a_file_that_changes_meanwhile_is_refused(
    reg: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = safetensors(tmp_path)
    hashed = digesting._entry

    def entry(*given: Any) -> Any:
        path.touch()
        return hashed(*given)

    monkeypatch.setattr(digesting, "_entry", entry)
    with pytest.raises(InvalidInput, match="changed while it was read"):
        reg.attest(path)


def test_a_limit_of_the_size_holds(reg: Registry, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="size limit"):
        reg.attest(safetensors(tmp_path), max_bytes=1000)
