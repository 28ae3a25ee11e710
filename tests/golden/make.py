"""How the golden samples were made. They are made once and read for ever.

    python -m tests.golden.make NEW_FOLDER

writes them anew into a folder that does not exist yet, to look at; it refuses any other, so that
the samples in git are never replaced by accident. When something gets a new version, its samples go
into a folder of their own (`v2/`), and the old ones stay: every later Holdfast must read both. Here
are those of version 1, but for its snapshot, which nobody can make any more; `make_v2` has others.
"""

from __future__ import annotations

import itertools
import sys
from collections import OrderedDict
from pathlib import Path
from unittest import mock

import numpy as np
import torch

import holdfast
from holdfast import Monitor
from holdfast.registry.history.actions import (
    AddCheckpoint,
    Commit,
    CreateRun,
    Mark,
    Place,
    ReportMetrics,
    Rewind,
    SetStatus,
    SetTag,
    TakeOver,
    line_digest,
)
from holdfast.registry.history.epochs import encode_sweep, encode_upgrade
from holdfast.registry.history.log import RunLog
from holdfast.registry.history.replay import RunManifest, Slot, advance
from holdfast.registry.objects.framing import join_lines
from holdfast.registry.objects.keys import ObjectKey, epoch_key
from holdfast.registry.objects.manifest import Component, Manifest
from holdfast.registry.objects.pack import PackTable, trailer
from holdfast.registry.objects.placement import NO_BASE, ChunkRow, PackRef, Placement, Rows
from holdfast.registry.objects.tensor_entry import TensorEntry
from holdfast.registry.store.store import RegistryConfig
from holdfast.registry.values.digest import Digest, Digests
from tests.golden import make_v2

NOW_S = 1_767_323_045.0
NOW_MS = int(NOW_S * 1000)
CHUNKS = (bytes(range(200)), b"second chunk " * 20, b"\0" * 100)


def digest(text: str) -> Digest:
    return Digest.of(text.encode())


# Single files


def manifest() -> Manifest:
    """One tensor inline, one empty, one in chunks, one by a digest list; skeletons of all kinds."""
    model = Component.build(
        {"d": [["w", {"t": 0}], ["b", {"n": 1}], ["big", {"t": 2}], ["none", {"n": 3}]]},
        [
            TensorEntry("float32", (2, 3), inline=bytes(range(24))),
            TensorEntry("bfloat16", (100,), chunks=(digest("b"),)),
            TensorEntry("uint8", (257 * 4 * 2**20,), chunk_list=digest("list")),
            TensorEntry("complex128", (0, 7), inline=b""),
        ],
    )
    plain = Component.build([1, None, True, "ä", {"tu": []}], [])
    return Manifest("odict", {"model": model, "ü": plain})


def pack() -> tuple[Digest, bytes]:
    table = PackTable.of_raw([*map(Digest.of, CHUNKS)], [*map(len, CHUNKS)])
    encoded = table.encode()
    return Digest.of(encoded), b"".join([*CHUNKS, encoded, trailer(encoded)])


def placement() -> Placement:
    packs = (
        PackRef(ObjectKey("packs", digest("p0"), 0), 1000),
        PackRef(ObjectKey("packs", digest("p1"), 12), 2**33),
    )
    rows = (
        ChunkRow(0, 0, 400),
        ChunkRow(1, 2**32 + 5, 2**22, 0, NO_BASE),
        ChunkRow(0, 400, 60),
    )
    return Placement(digest("manifest"), packs, Rows(rows), Digests([digest("extra")]))


def _commit(n: int, prev: Digest | None, *actions: object) -> Commit:
    return Commit(
        n=n,
        run="golden",
        prev=prev,
        write=f"{n:016x}",
        author="trainer@host",
        time_ms=NOW_MS + n,
        actions=actions,
    )


def slots() -> list[Slot]:
    """Every action there is: a run that is begun, saved into, marked, rewound and completed."""
    begin = _commit(
        0,
        None,
        CreateRun(
            config={"d": [["lr", {"f": "3f50624dd2f1a9fc"}]]},
            config_hash=digest("config"),
            input_hash="input",
            seed="00000000a1b2c3d4",
            environment={"host": "host"},
            monitors=(Monitor(metric="loss", mode="min"),),
        ),
    )
    first = _commit(
        1,
        line_digest(begin.encode()),
        TakeOver(token="t0", host="gpu-a"),
        AddCheckpoint(
            manifest=digest("m1"),
            phase="1",
            step=10,
            metrics={"loss": 0.5, "acc": float("inf")},
            meta={"d": [["epoch", 3]]},
            size_bytes=1234,
        ),
    )
    second = _commit(
        2,
        line_digest(first.encode()),
        AddCheckpoint(manifest=digest("m2"), phase="fine-tune", step=2**53, size_bytes=0),
    )
    third = _commit(
        3,
        line_digest(second.encode()),
        Rewind(to=1),
        AddCheckpoint(
            manifest=digest("m3"), phase="1", step=11, metrics={"loss": -0.0}, size_bytes=5
        ),
    )
    fourth = _commit(
        4,
        line_digest(third.encode()),
        ReportMetrics(checkpoint=3, metrics={"mu": 27.1}),
        SetTag(name="keeper", checkpoint=1),
        SetStatus(status="completed"),
    )

    def place(name: str, generation: int) -> Place:
        return Place(
            manifest=digest(name),
            manifest_generation=generation,
            placement=digest(f"placement of {name}"),
            placement_generation=generation,
        )

    return [
        Slot.build(0, [begin]),
        Slot.build(1, [place("m1", 0), first]),
        Slot.build(2, [Mark(epoch=3)]),
        Slot.build(3, [place("m2", 3), second, place("m3", 3), third]),
        Slot.build(4, [fourth]),
    ]


def condemned() -> list[ObjectKey]:
    return [
        ObjectKey("packs", digest("p0"), 0),
        ObjectKey("manifests", digest("m"), 2),
        ObjectKey("placements", digest("pl"), 0),
    ]


def config() -> RegistryConfig:
    return RegistryConfig(id="0123456789abcdef" * 2, created_ms=NOW_MS, race_probe="passed")


def state() -> RunManifest:
    return advance(RunManifest(run_id="golden"), slots())


# A whole registry


def states() -> list[dict]:
    """Three small states: torch, NumPy and many kinds of plain values."""

    def one(i: int) -> dict:
        return {
            "model": OrderedDict(
                w=torch.arange(48, dtype=torch.float32).reshape(6, 8) + i,
                h=torch.arange(40).to(torch.bfloat16) * i,
                flag=torch.tensor([True, False]),
            ),
            "optimizer": {
                "state": {0: {"m": np.arange(30, dtype=np.float64) * i, "step": np.int32(i)}},
                "lr": 0.1 * i,
                "betas": (0.9, 0.999),
            },
            "rng": (3, tuple(range(10)), None),
            "names": ["ä", b"\xff\0", 2**70, -0.0, {5: True, "5": False}],
        }

    return [one(i) for i in (1, 2, 3)]


def build_registry(folder: Path) -> None:
    """Live through a short run: saves, a report, a tag, a rewind, a sweep, a snapshot, an end."""
    counter = itertools.count(1)
    fixed = {
        "time.time": lambda: NOW_S,
        "secrets.token_hex": lambda n: f"{next(counter):0{2 * n}x}",
        "holdfast.registry.history.authorship.author": lambda: "trainer@host",
        "holdfast.registry.history.creating.describe_environment": lambda: {
            "host": "host",
            "python": "3.11",
        },
        "holdfast.registry.history.writer_token.host_name": lambda: "host",
    }
    with mock.patch("holdfast.registry.history.log.SNAPSHOT_EVERY", 4):
        patches = [mock.patch(name, value) for name, value in fixed.items()]
        for patch in patches:
            patch.start()
        try:
            _live(folder)
        finally:
            for patch in patches:
                patch.stop()


def _live(folder: Path) -> None:
    with holdfast.init(folder, skip_race_probe=True) as reg:
        run = reg.create_run(
            "golden", seed=7, config={"lr": 1e-3}, monitor=Monitor(metric="loss", mode="min")
        )
        first, second, third = states()
        kept = run.save(first, step=10, phase=1, metrics={"loss": 2.0}, meta={"epoch": 1})
        run.save(second, step=20, phase=1, metrics={"loss": 1.0})
        run.pins.tags.set("keeper", kept)
        reg.handle.store.backend.put_if_absent(epoch_key(1), encode_sweep(1, condemned()))
        log = RunLog(reg.handle.store, "golden")
        log.open()
        log.append(lambda state: [Mark(epoch=1)])
        # Another handle: it observes epoch 1, takes the run over and goes back to the first.
        run = reg.run("golden")
        run.restore(at=run.checkpoints()[0])
        again = run.save(third, step=20, phase=1, metrics={"loss": 3.0})
        again.report({"mu": 27.1, "bad": float("nan")})
        run.status = "completed"


def files() -> dict[str, bytes]:
    """Return the single files by name."""
    name, data = pack()
    return {
        "manifest": manifest().encode(),
        "pack": data,
        "placement": placement().encode(),
        "slot_commit_place": slots()[1].data,
        "slot_mark": slots()[2].data,
        "slot_many": slots()[3].data,
        "epoch_sweep": encode_sweep(1, condemned()),
        "epoch_upgrade": encode_upgrade(2, 1),
        "registry.json": join_lines([config().encode()]),
        "log": b"".join(slot.data for slot in slots()),
        "names.txt": "".join(
            f"{what} {value.hex()}\n"
            for what, value in {
                "manifest": manifest().digest,
                "pack": name,
                "placement": placement().digest,
                "head": state().head or b"",
            }.items()
        ).encode(),
    }


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir()
    for version, made, build in (
        ("v1", files(), build_registry),
        ("v2", make_v2.files(), make_v2.build_registry),
    ):
        (folder / version).mkdir()
        for name, data in made.items():
            (folder / version / name).write_bytes(data)
        build(folder / version / "registry")


if __name__ == "__main__":
    main()
