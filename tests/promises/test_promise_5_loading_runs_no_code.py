"""Promise 5: loading never runs code that came with a checkpoint."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from holdfast.backends import Backend
from holdfast.registry import formats
from holdfast.registry.errors import IncompatibleState, IntegrityError, InvalidInput
from holdfast.registry.face.registry import Registry
from holdfast.registry.history.actions import AddCheckpoint, Place
from holdfast.registry.history.authorship import commit_line
from holdfast.registry.history.log import RunLog
from holdfast.registry.objects.manifest import Component, Manifest
from holdfast.registry.objects.placement import Placement, Rows
from holdfast.registry.values.canonical import Json
from holdfast.registry.values.digest import Digest
from holdfast.registry.writing.object_writer import ObjectWriter
from tests.support.pictures import RUN
from tests.support.stores import opened

_FORBIDDEN = (
    *("pickle.find_class", "os.system", "os.exec", "os.spawn", "os.posix_spawn", "os.fork"),
    *("subprocess.Popen", "pty.spawn", "ctypes.dlopen"),
)
_watching: list[list[str]] = []


def _hook(event: str, _: object) -> None:
    for seen in _watching:
        if event in _FORBIDDEN:
            seen.append(event)


sys.addaudithook(_hook)


@contextmanager
def no_code_runs() -> Iterator[None]:
    """Fail if a program is started or a name is looked up for a pickle meanwhile."""
    seen: list[str] = []
    _watching.append(seen)
    try:
        yield
    finally:
        _watching.remove(seen)
    assert seen == []


class Evil:
    """What a pickle runs when it is loaded."""

    def __init__(self, canary: Path) -> None:
        self._canary = canary

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self._canary}",)


def _evil_skeletons(canary: Path) -> list[Json]:
    command = f"touch {canary}"
    return [
        {"call": ["os.system", [command]]},
        {"reduce": ["posix", "system", [command]]},
        {"py/reduce": [{"py/function": "os.system"}, {"py/tuple": [command]}]},
        {"py/object/apply:os.system": [command]},
        {"__class__": "os.system", "__args__": [command]},
        {"pickle": pickle.dumps(Evil(canary)).hex()},
        {"ad": ["os.system", command]},
        {"ad": ["subprocess.Popen", [command]]},
        {"dd": ["os.system", [[command, command]]]},
        {"od": [["__reduce__", {"eval": f"__import__('os').system({command!r})"}]], "x": 1},
        {"nd": "object"},
        {"path": ["posix", {"lambda": command}]},
    ]


def _publish(registry: Registry, skeleton: Json) -> None:
    """Commit a checkpoint whose every digest is right, and whose state is evil."""
    manifest = Manifest("dict", {"model": Component.build(skeleton, [])})
    placement = Placement(manifest.digest, (), Rows(()))
    log = RunLog(registry.handle.store, RUN)
    log.open()
    writer = ObjectWriter(registry.handle.store, log)
    writer.put_small("manifests", manifest.digest, manifest.encode(), Manifest)
    writer.put_small("placements", placement.digest, placement.encode(), Placement)
    place = Place(
        manifest=Digest(manifest.digest),
        manifest_generation=0,
        placement=placement.digest,
        placement_generation=0,
    )
    step = log.run.commits
    added = AddCheckpoint(manifest=manifest.digest, phase="main", step=step, size_bytes=0)
    log.append(lambda state: [place, commit_line(state, [added])])


def test_promise_5_loading_runs_no_code(store: Backend, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    skeletons = _evil_skeletons(canary)
    with opened(store) as registry:
        run = registry.create_run(RUN, seed=1)
        for skeleton in skeletons:
            _publish(registry, skeleton)
        run.refresh()
        assert len(run.checkpoints()) == len(skeletons)
        with no_code_runs():
            for checkpoint in run.checkpoints():
                with pytest.raises((IntegrityError, IncompatibleState)):
                    checkpoint.load()
    assert not canary.exists()


@pytest.mark.parametrize("name", ["evil.pt", "evil.ckpt", "evil.pth", "plain.pt"])
def test_promise_5_holds_for_files_that_are_pushed(tmp_path: Path, name: str) -> None:
    canary, file = tmp_path / "canary", tmp_path / name
    if name == "plain.pt":
        file.write_bytes(pickle.dumps({"model": Evil(canary)}))
    else:
        torch.save({"model": Evil(canary)}, file)
    with no_code_runs(), pytest.raises(InvalidInput):
        formats.read(file)
    assert not canary.exists()
    pickle.loads(pickle.dumps(Evil(canary)))
    assert canary.exists()  # it would have run
