"""Folders of strangers: no link leads out, no depth ends a reader, no name starts a program."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.registry import formats
from holdfast.registry.errors import IncompatibleState, InvalidInput, RegistryError
from holdfast.registry.face.registry import Registry
from holdfast.registry.formats import source, thalia
from holdfast.registry.layouts import import_spec
from tests.registry.formats import test_cobre, test_hf, test_thalia
from tests.registry.layouts.test_round_trips import adr_tree
from tests.support.commands import invoke


def hf(folder: Path) -> Path:
    test_hf.small(folder)
    (folder / "vocab").mkdir()
    (folder / "vocab/words.txt").write_text("a")
    return folder


def policy(folder: Path) -> Path:
    formats.write(folder, test_cobre.policy(), format="cobre")
    return folder


def arrays(folder: Path) -> Path:
    formats.write(folder, {"model": {"w": torch.ones(3)}}, format="zarr")
    return folder


def files(folder: Path) -> Path:
    (folder / "inner").mkdir(parents=True)
    (folder / "inner/notes.txt").write_text("notes")
    return folder


FOLDERS = {"hf": hf, "cobre": policy, "zarr": arrays, "tree": files}
each_folder = pytest.mark.parametrize("name", FOLDERS)


def entries(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


def moved_out(part: Path, folder: Path) -> None:
    """Move a part of a folder elsewhere, and leave a link."""
    away = folder / "private"
    part.rename(away)
    part.symlink_to(away)


@each_folder
def test_no_link_of_a_folder_is_followed(name: str, tmp_path: Path) -> None:
    whole = FOLDERS[name](tmp_path / "whole")
    formats.read(whole, format=name)
    (tmp_path / "named").symlink_to(whole)  # the user's own link is
    formats.read(tmp_path / "named", format=name)
    for number, one in enumerate(entries(whole)):
        place = tmp_path / str(number)
        place.mkdir()
        copy = shutil.copytree(whole, place / "copy")
        moved_out(copy / one.relative_to(whole), place)
        with pytest.raises(InvalidInput):
            formats.read(copy, format=name)
        assert formats.validate(copy, format=name)


def test_a_link_of_a_folder_is_refused_with_what_to_do(tmp_path: Path) -> None:
    folder = hf(tmp_path / "a")
    (folder / "vocab.txt").symlink_to("/proc/self/environ")
    with pytest.raises(InvalidInput, match=r"vocab\.txt: a link in a folder.*cp -rL"):
        formats.read(folder, format="hf")
    done = invoke("file", "convert", folder, tmp_path / "b.pt", "--read-as", "hf")
    assert done.exit_code == 3
    assert not (tmp_path / "b.pt").exists()


@pytest.mark.parametrize("kind", ["fifo", "device", "link"])
def test_what_is_no_file_is_refused_and_nobody_waits(kind: str, tmp_path: Path) -> None:
    for name, make in FOLDERS.items():
        folder = make(tmp_path / name)
        part = next(one for one in entries(folder) if one.is_file() and "config" not in one.name)
        part.unlink()
        if kind == "fifo":
            os.mkfifo(part)
        elif kind == "device":
            os.mknod(part, 0o20600, os.makedev(1, 5))  # /dev/zero
        else:
            part.symlink_to("/proc/self/fd/0")
        with pytest.raises(InvalidInput):
            formats.read(folder, format=name)


def cache(folder: Path, repository: str = "models--a--b") -> Path:
    """Write the cache of a hub's client: snapshots of links into blobs."""
    repo = folder / repository
    repo.mkdir()
    hf(repo / "plain")
    whole = [one for one in entries(repo / "plain") if one.is_file()]
    for number, file in enumerate(whole):
        name = file.relative_to(repo / "plain")
        link = repo / "snapshots/rev" / name
        blob = repo / "blobs" / f"{number:040x}"
        for one in (link, blob):
            one.parent.mkdir(parents=True, exist_ok=True)
        file.rename(blob)
        link.symlink_to(os.path.relpath(blob, link.parent))
    shutil.rmtree(repo / "plain")
    return repo / "snapshots/rev"


def test_a_snapshot_leads_to_the_blobs_of_its_own_repository_alone(tmp_path: Path) -> None:
    snapshot, other = cache(tmp_path), cache(tmp_path, "models--c--d")
    wanted = formats.read(hf(tmp_path / "whole"), format="hf").state
    assert set(formats.read(snapshot, format="hf").state) == set(wanted)
    (tmp_path / "named").symlink_to(snapshot)
    assert formats.read(tmp_path / "named", format="hf").state["files"]["vocab/words.txt"] == b"a"
    formats.read(snapshot / "adapter_model.safetensors")
    link = snapshot / "vocab/words.txt"
    inner = snapshot.parent.parent / "blobs/inner"
    inner.mkdir()
    (inner / "x").write_text("x")
    blob = snapshot.parent.parent / f"blobs/{'f' * 40}"
    blob.symlink_to("/etc/hostname")
    for target in (
        other.parent.parent / f"blobs/{0:040x}",
        Path("/etc/hostname"),
        inner / "x",
        blob,
        snapshot / "config.json",
        Path("../../../blobs/../snapshots/rev/config.json"),
    ):
        link.unlink()
        link.symlink_to(target)
        with pytest.raises(InvalidInput, match=r"a link|cannot be read"):
            formats.read(snapshot, format="hf")


def test_an_index_and_a_delta_name_parts_of_their_folder_alone(tmp_path: Path) -> None:
    index = test_hf.sharded(tmp_path / "m")
    moved_out(index.with_name("model-00001-of-00003.safetensors"), tmp_path)
    with pytest.raises(InvalidInput, match="a link"):
        formats.read(index)
    state = test_thalia.brain()
    (tmp_path / "brains").mkdir()
    base, path = tmp_path / "brains/base.thalia", tmp_path / "brains/next.delta.thalia"
    thalia.save(base, state)
    thalia.save_delta(path, state, base)
    moved_out(base, tmp_path / "m")
    with pytest.raises(InvalidInput, match="a link"):
        formats.read(path)
    data = path.read_bytes()
    at = data.index(b"delta_info")
    while int.from_bytes(data[at - 4 : at], "little") != len(data) - at:
        at -= 1
    about = json.loads(data[at:])
    for name in (str(tmp_path / "m/private"), "../m/private", "/etc/hostname", "/nowhere", 7):
        about["delta_info"]["base_checkpoint"] = name
        text = json.dumps(about).encode()
        path.write_bytes(data[: at - 4] + len(text).to_bytes(4, "little") + text)
        with pytest.raises(InvalidInput, match="not a safe name") as told:
            formats.read(path)
        assert "SHA-256" not in str(told.value)
    with pytest.raises(InvalidInput, match="in the folder of the delta"):
        thalia.save_delta(tmp_path / "brains/far.thalia", state, tmp_path / "m/private")


def test_many_indices_of_one_shard_read_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "m"
    index = test_hf.sharded(folder)
    opened: list[str] = []
    opening = source._open
    monkeypatch.setattr(source, "_open", lambda path: opened.append(path.name) or opening(path))
    shard, counts = "model-00001-of-00003.safetensors", []
    for more in (0, 20):
        for number in range(more):
            shutil.copy(index, folder / f"{number}.safetensors.index.json")
        opened.clear()
        found: Any = formats.read(folder, format="tree").state
        assert len(found["tree"]["files"]) == 4 + more
        counts.append(opened.count(shard))
    assert counts[0] == counts[1]


# Depth


def deep(folder: Path, depth: int = 1100) -> None:
    """Make folders within each other, deeper than Python's stack and than the longest path."""
    fd = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("a", dir_fd=fd)
        inner = os.open("a", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(os.open("file", os.O_WRONLY | os.O_CREAT, dir_fd=fd))
    os.close(fd)


@pytest.fixture
def removed_by_rm(tmp_path: Path) -> Any:
    yield None
    os.system(f"rm -rf '{tmp_path}'/*")


def test_deep_folders_are_an_error_of_ours(tmp_path: Path, removed_by_rm: None) -> None:
    (tmp_path / "deep").mkdir()
    deep(tmp_path / "deep")
    for name, make in FOLDERS.items():
        folder = make(tmp_path / name)
        (tmp_path / "deep").rename(folder / "deep")
        for call, most in (
            (formats.read, None),
            (formats.inspect, 2**30),
            (formats.validate, None),
        ):
            with suppress(RegistryError):
                call(folder, format=name, max_bytes=most)
        (folder / "deep").rename(tmp_path / "deep")


@pytest.mark.parametrize("layout", ["hf", "andrea"])
def test_a_deep_folder_does_not_hide_the_others(
    layout: str, reg: Registry, tmp_path: Path, removed_by_rm: None
) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    if layout == "hf":
        hf(tree / "checkpoint-1")
        deep(hf(tree / "checkpoint-2"))
    else:
        deep(tree)
    run = reg.create_run("r", preset=import_spec(layout))
    taken = run.exchange.import_tree(tree, layout=layout)
    assert any(one.outcome == "refused" for one in taken)
    if layout == "hf":
        assert [one.path for one in taken if one.outcome == "imported"]


# Imports


def test_a_policy_with_a_link_is_not_imported(reg: Registry, tmp_path: Path) -> None:
    folder = policy(tmp_path / "tree/policy") if (tmp_path / "tree").mkdir() is None else None
    assert folder is not None
    moved_out(folder / "cuts/stage_000.bin", tmp_path)
    run = reg.create_run("r", preset=import_spec("cobre"))
    taken = {
        one.path: one.outcome for one in run.exchange.import_tree(tmp_path / "tree", layout="cobre")
    }
    assert taken == {"policy": "refused", "policy/cuts/stage_000.bin": "refused"}
    assert not run.checkpoints()


def test_a_card_in_a_state_is_no_path(reg: Registry, tmp_path: Path) -> None:
    tree = adr_tree(tmp_path / "tree")
    private = tmp_path / "private.yml"
    shutil.copy(tree / "metadata/model_cards/v1.0.0.yaml", private)
    for version in ("1.0.0", "1.0.1"):
        (tree / f"metadata/model_cards/v{version}.yaml").unlink()
        release = tree / f"production/bayesian_transformer_v{version}.pt"
        state = torch.load(release, weights_only=True)
        torch.save({**state, "model_card": str(private)}, release)
    for spec in (import_spec("adr004"), None):
        run = reg.create_run(f"r{spec is None}", preset=spec)
        taken = run.exchange.import_tree(tree, layout="adr004")
        cards = [one.card for one in run.releases.list()]
        assert not any(cards), cards
        assert "refused" in {one.outcome for one in taken if one.kind == "release"}


def test_a_card_that_is_a_link_is_not_read(reg: Registry, tmp_path: Path) -> None:
    tree = adr_tree(tmp_path / "tree")
    moved_out(tree / "metadata/model_cards/v1.0.0.yaml", tmp_path)
    run = reg.create_run("r")
    run.exchange.import_tree(tree, layout="adr004")
    state: Any = torch.load(tree / "production/bayesian_transformer_v1.0.0.pt", weights_only=True)
    assert run.releases.get("1.0.0").card == state["model_card"]


def test_a_metric_beyond_floats_is_refused_and_the_others_taken(
    reg: Registry, tmp_path: Path
) -> None:
    tree = adr_tree(tmp_path / "tree")
    file = tree / "training/epoch_0009_step_00009000.pt"
    state: Any = torch.load(file, weights_only=True)
    torch.save({**state, "metrics": {"loss": 2**2000}}, file)
    run = reg.create_run("r", preset=import_spec("adr004"))
    taken = {one.path: one.outcome for one in run.exchange.import_tree(tree, layout="adr004")}
    assert taken.pop("training/epoch_0009_step_00009000.pt") == "refused"
    assert taken["training/epoch_0010_step_00010000.pt"] == "imported"


# Programs


@pytest.mark.parametrize("name", [".git", ".GIT", "x/.Git/config", ".hg/hgrc", "GIT~1", ".git."])
@pytest.mark.parametrize("kind", ["tree", "hf"])
def test_no_pull_writes_a_folder_that_starts_programs(kind: str, name: str, tmp_path: Path) -> None:
    folder = FOLDERS[kind](tmp_path / "a")
    if kind == "hf":
        state: Any = formats.read(folder, format="hf").state
        state["files"][name] = b"[core]"
    else:
        (folder / "inner/notes.txt").rename(folder / "notes.txt")
        text = json.dumps(name)
        found: Any = formats.read(folder, format="tree").state
        found["tree"]["files"][json.loads(text)] = found["tree"]["files"].pop("notes.txt")
        found["files"][name] = found["files"].pop("notes.txt")
        state = found
    with pytest.raises((InvalidInput, IncompatibleState, RegistryError)):
        formats.write(tmp_path / "b", state, format=kind)
    assert not (tmp_path / "b").exists()


def test_a_repository_is_imported_without_its_git(reg: Registry, tmp_path: Path) -> None:
    hf(tmp_path / "tree/checkpoint-1") if (tmp_path / "tree").mkdir() is None else None
    (tmp_path / "tree/.git").mkdir()
    (tmp_path / "tree/.git/config").write_text("[core]")
    taken = reg.create_run("r").exchange.import_tree(tmp_path / "tree", layout="hf")
    assert {one.outcome for one in taken} == {"imported"}
