"""Registries of every kind that the pages are opened on."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

import holdfast
from holdfast import Monitor, Registry, Retention
from holdfast.registry.objects.framing import join_lines, split_lines

#: Markup in every text that a writer chooses; `hacked` would be set if any of it were run.
EVIL = "<img src=x onerror=hacked=1><script>hacked=1</script><b>&amp;"
EVIL_LINK = '<a href="javascript:hacked=1">x</a>'
LOSS = Monitor(metric="loss", mode="min")


def state(step: int) -> dict[str, object]:
    """Return a small state of a step."""
    return {
        "model": {"layer1": {"w": np.full((8, 8), step, np.float32)}, "b": np.zeros(4)},
        "optimizer": {"m": np.full(64, step, np.float32)},
    }


def ordinary(reg: Registry) -> None:
    """Fill a registry with a run, its fork, and a merge of both."""
    night = reg.create_run(
        "night", seed=1, monitor=LOSS, config={"lr": 0.1, "data": {"path": "digits"}},
        retention=Retention(last=3, best=1),
    )  # fmt: skip
    for step in range(10, 90, 10):
        loss = 2 * math.exp(-step / 30)
        entries = [{"step": at, "lr": 0.1 / at} for at in range(step - 9, step + 1)]
        night.save(
            state(step), step=step, metrics={"loss": loss, "accuracy": 1 - loss / 2},
            streams={"rate": entries},
        )  # fmt: skip
    best = night.best()
    assert best is not None
    night.pins.gates.set("trained", best)
    night.pins.tags.set("shipped", best)
    card = {"description": "d", "intended_use": "u"}
    night.releases.publish("1.0.0", best, only=["model"], card=card)
    night.restore(at=night.checkpoints()[-2])
    night.save(state(75), step=75, metrics={"loss": 0.2, "accuracy": 0.9})
    fork = reg.fork(
        "night/gates/trained",
        "night-wide",
        config={"lr": 0.2, "wide": True},
        owner="ana",
        labels=["prod"],
    )
    fork.restore()
    fork.save(state(90), step=90, metrics={"loss": 0.05, "accuracy": 0.98}).report({"test": 0.97})
    soup = reg.create_run("soup", monitor=LOSS)
    sources = [reg.checkpoint("night/latest"), reg.checkpoint("night-wide/latest")]
    soup.exchange.merge(sources, step=90, pick={"optimizer": sources[0]})


def sweep(reg: Registry) -> None:
    """Fill a registry with a sweep over lr and batch, a fork that is worse, and another metric."""
    for number, (lr, batch) in enumerate(((0.1, 16), (0.01, 16), (0.001, 32), (0.03, 32))):
        config = {"lr": lr, "batch": batch, "data": {"path": "digits"}}
        run = reg.create_run(f"sweep-{number}", monitor=LOSS, config=config)
        for step in (100, 200, 300):
            loss = 1 + abs(math.log10(lr) + 2) - step / 1000 + (0.3 if step == 300 else 0)
            run.save(state(step), step=step, metrics={"loss": loss, "accuracy": 1 - loss / 4})
    fork = reg.fork("sweep-1/main/step00000200", "longer")
    fork.restore()
    fork.save(state(400), step=400, metrics={"loss": 7.5})
    words = reg.create_run("words", monitor=Monitor(metric="bleu", mode="max"))
    for step, bleu in ((100, 20.0), (200, 28.0), (300, 25.0)):
        words.save(state(step), step=step, metrics={"bleu": bleu})


def hostile(reg: Registry) -> None:
    """Fill a registry with markup in metrics, configuration, reasons, notes and other texts."""
    run = reg.create_run("night", monitor=Monitor(metric=EVIL, mode="min"), config={EVIL: [EVIL]})
    for step in (1, 2, 3):
        run.save(
            {"model": {EVIL: np.arange(4.0), "w": np.zeros(2)}},
            step=step,
            metrics={EVIL: 1.0 / step, EVIL_LINK: float(step), "nan": float("nan")},
            meta={EVIL: EVIL_LINK},
            streams={"rate": [{"step": step, EVIL: step, "text": EVIL, "svg": EVIL.encode()}]},
        )
    run.history.set_note(EVIL + EVIL_LINK)
    run.history.set_note(EVIL, run.latest())
    run.retention.evict(run.checkpoints()[0], reason=EVIL)
    card = {"description": EVIL, "intended_use": EVIL_LINK}
    run.releases.publish("1.0.0", run.checkpoints()[0], card=card)
    run.releases.rollback("1.0.0", reason=EVIL)
    reg.fork("night/latest", "night-wide", config={EVIL: EVIL_LINK})
    dropped = reg.create_run("dropped")
    dropped.retention.drop(EVIL)


def damage(folder: Path) -> None:
    """Damage a slot in the middle of `night`, the first one of `torn`, the manifest of `soup`.

    `night` has no snapshot, which would hide the damage from whoever only opens it.
    """
    with holdfast.open(folder) as reg:
        name = reg.checkpoint("soup/latest").digest.hex()
    (manifest,) = (folder / "manifests" / name[:2]).glob(f"{name}.*")
    manifest.write_bytes(manifest.read_bytes()[:-1])
    for name, number in (("night", 4), ("torn", 0)):
        slots = sorted((folder / "runs" / name / "log").iterdir())
        slots[number].write_bytes(b"not a slot\n")
    shutil.rmtree(folder / "runs" / "night" / "snapshots")


def many(folder: Path) -> None:
    """Add a thousand runs that have begun, of which pages may read only those that they show."""
    first = sorted((folder / "runs" / "night" / "log").iterdir())[0]
    lines = split_lines(first.read_bytes(), where=first.name)
    for number in range(1000):
        name = f"20200101_{number // 60:04d}{number % 60:02d}_0000000a"
        log = folder / "runs" / name / "log"
        log.mkdir(parents=True)
        named = [line.replace(b'"night"', f'"{name}"'.encode()) for line in lines]
        (log / first.name).write_bytes(join_lines(named))


def make(kind: str, folder: Path) -> Path:
    """Make a registry of a kind, and return its folder."""
    fill: dict[str, Callable[[Registry], None]] = {"hostile": hostile, "sweep": sweep}
    with holdfast.init(folder, skip_race_probe=True) as reg:
        if kind != "empty":
            fill.get(kind, ordinary)(reg)
        if kind == "damaged":
            reg.create_run("torn")
    if kind == "damaged":
        damage(folder)
    if kind == "many":
        many(folder)
    return folder
