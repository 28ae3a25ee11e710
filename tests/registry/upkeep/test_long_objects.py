"""An object of any length that takes no space: it costs the run that it is in, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.registry.objects.keys import slot_key, snapshot_key
from tests.support.commands import invoke

_SIZE = 3 * 2**30


def sparse(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    os.truncate(path, _SIZE)


def next_slot(root: Path) -> Path:
    return root / slot_key("bad", 2)


def first_slot(root: Path) -> Path:
    return root / slot_key("bad", 0)


def snapshot(root: Path) -> Path:
    return root / snapshot_key("bad", 1)


def pack(root: Path) -> Path:
    return root / "packs" / "00" / f"{'00' * 32}.0"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "r"
    with holdfast.init(root, skip_race_probe=True) as registry:
        for name in ("bad", "good"):
            registry.create_run(name).save({"w": np.arange(300.0)}, step=1)
    return root


@pytest.mark.parametrize("place", [next_slot, first_slot, snapshot, pack])
def test_the_other_runs_are_checked(root: Path, place: Callable[[Path], Path]) -> None:
    found_at = place(root)
    sparse(found_at)
    damaged = next(root.glob("runs/good/log/*1"))
    damaged.write_bytes(b"x" + damaged.read_bytes()[1:])
    for arguments in (["verify"], ["verify", "--deep"]):
        found = invoke(*arguments, "-r", root)
        assert found.exit_code == 6, found.output
        assert "good" in found.output
        if place is not pack or "--deep" in arguments:
            assert found_at.stem in found.output.replace("\n", "").replace(" ", "")
    damaged.write_bytes(b"{" + damaged.read_bytes()[1:])
    assert "good" in invoke("run", "ls", "-r", root).output
    assert invoke("ls", "good", "-r", root).exit_code == 0
    assert invoke("run", "show", "good", "-r", root).exit_code == 0
    opens = invoke("ls", "bad", "-r", root)
    assert (opens.exit_code == 0) == (place in (snapshot, pack)), opens.output
