"""How the golden registries were made: whole registries, one for each way to store a run.

    python -m tests.golden.make_registries NEW_FOLDER

They are made once and read for ever, like the samples of `tests.golden.make`. Each is an archive,
since it has some sixty small files.
"""

from __future__ import annotations

import json
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import holdfast
from holdfast.distributed import ThreadGroup
from tests.registry.saving.collective.ranks import together
from tests.registry.saving.collective.rows import Rows, shard_rows
from tests.support.keys import GOLDEN_KEY, write_key

STEPS = range(1, 4)
_NOW_S = 1_767_323_045.0
_FIXED: dict[str, object] = {
    "holdfast.registry.history.authorship.author": "trainer@host",
    "holdfast.registry.history.creating.describe_environment": {},
    "holdfast.registry.history.writer_token.host_name": "host",
}


def state(step: int) -> dict[str, Any]:
    """Return a state of which a little changes from step to step."""
    weights = np.linspace(-1, 1, 1200, dtype=np.float32).reshape(12, 100)
    weights[step] *= 1 + 2**-10
    moments = (np.arange(300, dtype=np.float64) % 7) * step
    return {
        "model": {"w": weights, "b": np.arange(12, dtype=np.int64)},
        "optimizer": {"m": moments, "lr": 1e-3, "betas": (0.9, 0.999), 7: None},
        "epoch": step,
    }


def _saved(folder: Path, **options: Any) -> None:
    with holdfast.init(folder, skip_race_probe=True, **options) as reg:
        run = reg.create_run("run")
        for step in STEPS:
            run.save(state(step), step=step, metrics={"loss": 1 / step})


def _pool(folder: Path) -> None:
    with holdfast.init(folder, skip_race_probe=True) as reg:
        run = reg.create_run("run")
        for step in STEPS:
            run.pool.promote(run.save(state(step), step=step), mu=20.0 + step, sigma=8.0)


def _streams(folder: Path) -> None:
    with holdfast.init(folder, skip_race_probe=True) as reg:
        run = reg.create_run("run")
        for step in STEPS:
            losses = [{"step": step, "loss": float(n)} for n in range(step)]
            run.save(state(step), step=step, streams={"losses": losses})


def _sharded(folder: Path) -> None:
    holdfast.init(folder, skip_race_probe=True).create_run("run")

    def train(group: Any) -> None:
        with holdfast.open(folder) as reg:
            run = reg.run("run", group=group)
            for step in STEPS:
                whole = state(step)
                whole["model"]["w"] = Rows(whole["model"]["w"], group.rank, group.size)
                run.save(whole, step=step)

    with pytest.MonkeyPatch.context() as patch:
        shard_rows(patch)
        assert together(ThreadGroup.make(2, 60), train) == [None, None]


def _journaled(folder: Path) -> None:
    holdfast.init(folder, skip_race_probe=True).create_run("run")
    with holdfast.open(folder, journal=folder.parent / "journal") as reg:
        run = reg.run("run")
        for step in STEPS:
            run.save(state(step), step=step)
        run.wait(remote=True)


def _signed(folder: Path) -> None:
    key = Ed25519PrivateKey.from_private_bytes(GOLDEN_KEY)
    source = write_key(folder.parent, "golden", key)
    with holdfast.init(folder, skip_race_probe=True) as reg:
        reg.create_run("run")
    with holdfast.open(folder, sign=source) as reg:
        run = reg.run("run")
        for step in STEPS:
            run.save(state(step), step=step, metrics={"loss": 1 / step})


REGISTRIES: dict[str, Callable[[Path], None]] = {
    "raw": lambda folder: _saved(folder),
    "auto": lambda folder: _saved(folder, compression="auto"),
    "zstd": lambda folder: _saved(folder, compression="zstd"),
    "lz4": lambda folder: _saved(folder, compression="lz4"),
    "deltas": lambda folder: _saved(folder, keyframe_every=4),
    "pool": _pool,
    "streams": _streams,
    "sharded": _sharded,
    "journaled": _journaled,
    "signed": _signed,
}


def make(folder: Path) -> None:
    """Make every registry, and `ids.json` with the ids of its checkpoints."""
    ids = {}
    with tempfile.TemporaryDirectory() as work, ExitStack() as fixed:
        fixed.enter_context(mock.patch("time.time", return_value=_NOW_S))
        for name, value in _FIXED.items():
            fixed.enter_context(mock.patch(name, return_value=value))
        for name, build in REGISTRIES.items():
            build(Path(work, name))
            with holdfast.open(Path(work, name)) as reg:
                ids[name] = [one.digest.hex() for one in reg.run("run").checkpoints()]
        folder.mkdir()
        for name in REGISTRIES:
            shutil.rmtree(Path(work, name, ".tmp"))
            with tarfile.open(folder / f"{name}.tar.gz", "w:gz") as archive:
                archive.add(Path(work, name), name)
    (folder / "ids.json").write_text(json.dumps(ids, indent=1) + "\n")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
