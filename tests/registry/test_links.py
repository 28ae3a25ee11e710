"""Symbolic links in a registry's folder: read through, never written or deleted through."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import holdfast
from holdfast import Retention, sync
from holdfast.registry.errors import RegistryError, StoreUnsuitable
from holdfast.registry.face.registry import Registry
from holdfast.registry.upkeep.gc import DAY_S, Collector
from tests.support.commands import invoke
from tests.support.states import save_small, small_state

#: An unfinished file and a probe, as they are called, so that only the link keeps them.
UNFINISHED = f"1-{'a' * 16}"
PROBE = f"{'b' * 16}/0001"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a registry of two runs: one has evicted checkpoints, one was swept."""
    root = tmp_path_factory.mktemp("links") / "root"
    with holdfast.init(root, skip_race_probe=True) as reg:
        for name in ("run", "other"):
            run = reg.create_run(name, seed=1)
            for step in (1, 2, 3):
                run.save(small_state(step if name == "run" else -step), step=step)
        reg.run("other").retention.prune(Retention(last=2))
        reg.gc(grace_s=0)
        for name in ("run", "other"):
            reg.run(name).retention.prune(Retention(last=1))
    return root


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    """Return a copy of it."""
    return Path(shutil.copytree(made, tmp_path / "root"))


@pytest.fixture
def reg(root: Path) -> Iterator[Registry]:
    with holdfast.open(root) as opened:
        yield opened


def files(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder, links followed; without what is set aside or scratch."""
    return {
        str(Path(place, name).relative_to(folder)): Path(place, name).read_bytes()
        for place, _, names in os.walk(folder, followlinks=True)
        for name in names
        if "/.tmp" not in place and Path(place, name).exists()
    }


def one(root: Path, folder: str) -> str:
    """Return the last name in a folder of the registry, with its path."""
    return f"{folder}/{max(path.name for path in (root / folder).iterdir())}"


PLACES: dict[str, Callable[[Path], str]] = {
    "packs": lambda _: "packs",
    "manifests": lambda _: "manifests",
    "placements": lambda _: "placements",
    "runs": lambda _: "runs",
    "epochs": lambda _: "epochs",
    "a folder of packs": lambda root: one(root, "packs"),
    "a folder of manifests": lambda root: one(root, "manifests"),
    "a pack": lambda root: one(root, one(root, "packs")),
    "a placement": lambda root: one(root, one(root, "placements")),
    "a run": lambda _: "runs/run",
    "another run": lambda _: "runs/other",
    "a log": lambda _: "runs/run/log",
    "a slot": lambda _: f"runs/run/log/{1:020d}",
    "another run's newest slot": lambda root: one(root, "runs/other/log"),
    "an epoch": lambda _: f"epochs/{1:020d}",
}
#: Those that a write of `run` need not come by.
DEEP = {"a pack", "a placement", "another run's newest slot"}


@pytest.fixture(params=PLACES)
def link(request: pytest.FixtureRequest, root: Path) -> str:
    """Put a part of the registry elsewhere and a link in its place; return the link's name."""
    name = PLACES[request.param](root)
    put_elsewhere(root, name)
    return name


def put_elsewhere(root: Path, name: str) -> Path:
    elsewhere = root.parent / "elsewhere" / name
    elsewhere.parent.mkdir(parents=True)
    shutil.move(root / name, elsewhere)
    (root / name).symlink_to(elsewhere)
    return elsewhere


def refused(act: Callable[[], object], root: Path, link: str) -> None:
    before = files(root)
    with pytest.raises(StoreUnsuitable, match="symbolic link") as caught:
        act()
    assert str(caught.value.where) in (str(root / link), f"file://{root / link}")
    assert files(root) == before


@pytest.mark.parametrize("leads", ["somewhere", "nowhere"])
def test_a_link_stops_collection(link: str, root: Path, leads: str, reg: Registry) -> None:
    if leads == "nowhere":
        shutil.move(root.parent / "elsewhere", root.parent / "gone")
    for dry_run in (True, False):
        refused(lambda d=dry_run: reg.gc(grace_s=0, dry_run=d), root, link)


WRITES: dict[str, Callable[[Registry, Path], object]] = {
    "save": lambda reg, _: reg.run("run").save(small_state(9), step=9),
    "report": lambda reg, _: reg.run("run").latest().report({"loss": 0.5}),
    "tag": lambda reg, _: reg.run("run").pins.tags.set("best", reg.run("run").latest()),
    "prune": lambda reg, _: reg.run("run").retention.prune(Retention(every=100)),
    "create_run": lambda reg, _: reg.create_run("new", seed=2),
    "fork": lambda reg, _: reg.fork("run", "new"),
    "repack": lambda reg, _: reg.repack(compression="zstd"),
    "sync": lambda _, root: sync(root.parent / "source", root),
}


@pytest.mark.parametrize("link", sorted(PLACES.keys() - DEEP), indirect=True)
def test_a_link_stops_writes(link: str, root: Path, request: pytest.FixtureRequest) -> None:
    place = request.node.callspec.params["link"]
    with holdfast.init(root.parent / "source", skip_race_probe=True) as source:
        source.create_run("third", seed=3).save(small_state(7), step=1)
    for name, write in WRITES.items():
        shared = name in ("create_run", "fork", "sync")
        if not (shared and place in ("a log", "a slot")):
            with holdfast.open(root) as reg:
                refused(lambda r=reg, w=write: w(r, root), root, link)


def test_a_link_is_read_through_and_told(link: str, root: Path, reg: Registry) -> None:
    for name in ("run", "other"):
        assert reg.run(name).latest().load()["optimizer"]["step"] in (3, -3)
    report = reg.verify(deep=True)
    told = {finding.where: finding.severity for finding in report.findings}
    assert told == {link: "error"}
    assert "replace it by the file or folder that it names" in report.findings[0].advice


def test_a_pack_behind_a_link_is_not_used_again(root: Path) -> None:
    """A save of what lies there already finds the pack by a listing, and would build on it."""
    with holdfast.open(root) as reg:
        packs = reg.run("run").latest().handle.reader.placement.packs
        pack = str(max(packs, key=lambda pack: pack.size_bytes).key)
        state = reg.run("run").latest().load()
        put_elsewhere(root, pack)
        run = reg.create_run("new", seed=5)
        refused(lambda: run.save(state, step=1), root, pack)


def test_a_link_that_comes_between_stops_the_sweep(root: Path, reg: Registry) -> None:
    collector = Collector(reg.handle.store, grace_s=0)
    collector.choose()
    collector.condemn()
    put_elsewhere(root, "runs/other/log")
    with pytest.raises(StoreUnsuitable, match="runs/other/log"):
        collector.mark()


def test_deletion_goes_through_no_link_that_comes_late(root: Path, reg: Registry) -> None:
    collector = Collector(reg.handle.store, grace_s=0)
    collector.choose()
    collector.condemn()
    collector.mark()
    elsewhere = put_elsewhere(root, "packs")
    before = files(elsewhere)
    with pytest.raises(StoreUnsuitable, match="packs"):
        collector.delete()
    assert files(elsewhere) == before


# Scratch folders


@pytest.fixture
def treasure(tmp_path: Path) -> Path:
    """Return a folder of somebody else's, with old files, some called like leftovers."""
    folder = tmp_path / "treasure"
    for name in ("thesis.tex", UNFINISHED, "0001", PROBE, f"clock-{'c' * 16}", "deep/er/file"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"precious")
        os.utime(path, (0, 0))
    return folder


@pytest.mark.parametrize("name", [".tmp", ".probe", f".probe/{'b' * 16}"])
@pytest.mark.parametrize("grace_s", [0, DAY_S])
def test_scratch_behind_a_link_is_not_touched(
    name: str, grace_s: float, root: Path, reg: Registry, treasure: Path
) -> None:
    if (root / name).exists():
        shutil.rmtree(root / name)
    (root / name).parent.mkdir(exist_ok=True)
    (root / name).symlink_to(treasure)
    before = files(treasure)
    refused(lambda: reg.gc(grace_s=grace_s), root, name)
    assert files(treasure) == before
    (finding,) = reg.verify().findings
    assert (finding.kind, finding.where) == ("link", name)
    assert finding.severity == ("error" if name == ".tmp" else "note")
    if name == ".tmp":
        refused(lambda: reg.run("run").save(small_state(9), step=9), root, name)


@pytest.mark.parametrize("name", [f".tmp/{UNFINISHED}", ".tmp/reserve", ".tmp/notes"])
def test_links_in_the_folder_of_unfinished_files_stay(
    name: str, root: Path, reg: Registry, treasure: Path
) -> None:
    shutil.rmtree(root / ".tmp")
    (root / ".tmp").mkdir()
    (root / name).symlink_to(treasure)
    before = files(treasure)
    reg.gc(grace_s=0)
    assert files(treasure) == before
    assert (root / name).is_symlink()
    assert [(f.where, f.severity) for f in reg.verify().findings] == [(name, "note")]


def test_foreign_files_in_scratch_folders_stay(root: Path, reg: Registry, treasure: Path) -> None:
    shutil.copytree(treasure, root / ".probe" / "mine")
    shutil.copy2(treasure / "thesis.tex", root / ".tmp")
    reg.gc(grace_s=0)
    assert files(root / ".probe" / "mine") == files(treasure)
    assert (root / ".tmp" / "thesis.tex").exists()


# The whole registry behind a link


def test_the_root_may_lie_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "mnt").mkdir()
    (tmp_path / "data").symlink_to("mnt")
    with holdfast.init(tmp_path / "data" / "root") as reg:
        run = reg.create_run("run", seed=1)
        save_small(run, 1, 2)
        run.retention.prune(Retention(last=1))
        assert reg.gc(grace_s=0).deleted.objects
        assert reg.verify(deep=True).findings == ()
    (tmp_path / "direct").symlink_to("data/root")
    with holdfast.open(tmp_path / "direct") as reg:
        reg.run("run").restore()
        assert reg.gc(grace_s=0).deleted.objects == 0


@pytest.mark.parametrize("part", ["a", "long-name-of-a-folder"])
def test_folders_nested_without_end_hide_no_run(
    tmp_path: Path, part: str, request: pytest.FixtureRequest
) -> None:
    """A name of one letter is deeper than Python's stack, a long one longer than any path."""
    with holdfast.init(tmp_path / "reg", skip_race_probe=True) as reg:
        for name in ("bad", "good"):
            save_small(reg.create_run(name), 1)
    request.addfinalizer(lambda: subprocess.run(["rm", "-rf", tmp_path / "reg"], check=True))
    fd = os.open(tmp_path / "reg/runs/bad", os.O_RDONLY)
    for _ in range(1200):
        os.mkdir(part, dir_fd=fd)
        inner = os.open(part, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(os.open("file", os.O_WRONLY | os.O_CREAT, dir_fd=fd))
    os.close(fd)
    with holdfast.open(tmp_path / "reg") as reg:
        assert "good" in reg.run_names()
        reg.verify()
        with suppress(RegistryError):  # it must know what every run needs
            reg.gc(dry_run=True)
    for command in ("run ls", "doctor", "verify", "gc --dry-run"):
        done = invoke("--registry", tmp_path / "reg", *command.split())
        assert "fault of holdfast" not in done.output
