"""How the golden samples of replay version 2 were made: the life of a run, as slots and lived.

The formats are those of version 1; new are actions, and with them what a snapshot holds. Made by
`tests.golden.make`.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from unittest import mock

import numpy as np

import holdfast
from holdfast import Monitor
from holdfast.registry.history.actions import (
    Acknowledge,
    AddCheckpoint,
    AppendStream,
    AppliedRow,
    ArchiveStream,
    Claim,
    Commit,
    CommitKeys,
    CreateRun,
    DropRun,
    EnterPhase,
    Evict,
    EvictEntries,
    Eviction,
    Parent,
    Place,
    PointRelease,
    Promote,
    Rated,
    RateMatch,
    Recover,
    ReportMetrics,
    Rewind,
    SetPin,
    SetTag,
    TakeOver,
    line_digest,
)
from holdfast.registry.history.replay import RunManifest, Slot, advance
from holdfast.registry.objects.framing import join_lines
from holdfast.registry.spec import (
    Draw,
    DtypeRule,
    Gate,
    Phase,
    Pool,
    Readiness,
    Retention,
    Row,
    RunSpec,
    Stream,
    Tier,
    Transition,
)
from holdfast.registry.values.digest import Digest

NOW_S = 1_767_323_045.0
NOW_MS = int(NOW_S * 1000)
_LOSS = Monitor(metric="loss", mode="min")
_SKILL = Monitor(metric="mu - 3*sigma", mode="max", name="skill")


def digest(text: str) -> Digest:
    return Digest.of(text.encode())


def spec() -> RunSpec:
    """Return a specification that says everything a specification can say."""
    return RunSpec(
        name="golden",
        about="one of everything",
        phases=(
            Phase(name="1", about="first", monitors=(_LOSS,), retention=Retention(last=2, best=1)),
            Phase(
                name="2",
                counter="update",
                save_every=10,
                monitors=(_SKILL, _LOSS),
                tiers=(
                    Tier(name="kept", every=100, retention=Retention(all=True)),
                    Tier(
                        name="rolling",
                        improves=("skill",),
                        retention=Retention(last=2, counts_protected=True, wait=1),
                    ),
                ),
                required_keys=("value",),
                companions=("reference",),
            ),
        ),
        required_keys=("model | policy",),
        commit_keys=("timestamp",),
        finite=("model/*",),
        dtypes=(DtypeRule(path="model/*", dtype="float32"),),
        version_key="schema",
        version=3,
        inference=("model",),
        gates=(Gate(name="bc_best", phase="1"),),
        pool=Pool(
            phase="2",
            size=1,
            promote_on_save=True,
            seed_child=4,
            draws=(Draw(kind="self", weight=3), Draw(kind="frozen", weight=1, name="bc_best")),
        ),
        streams=(
            Stream(name="losses", lifetime="forever"),
            Stream(name="bandit", lifetime="resettable"),
        ),
        card_fields=("intended_use",),
        transitions=(
            Transition(
                from_phase="1",
                to_phase="2",
                source="gates/bc_best",
                strict=("model",),
                zero=("model/new.*",),
                ready=(Readiness(metric="loss", at_most=0.5),),
                rows=(
                    Row(part="model", change="carry", why="go on"),
                    Row(part="model", change="freeze", companion="reference", dtype="bfloat16"),
                    Row(part="schema", change="carry", unless="anew"),
                ),
                anchors=("bc_best",),
                archives=("bandit",),
            ),
        ),
        layout={"latest": "latest.pt"},
    )


def slots() -> list[Slot]:
    """Every action that version 1 had not, in a legal life of a fork; the last slot ends it."""
    chain = _Chain()
    chain.then(
        CreateRun(
            config_hash=digest("config"),
            seed="00000000a1b2c3d4",
            environment={},
            spec=spec(),
            parent=Parent(
                run="parent",
                commit=7,
                head=digest("head"),
                checkpoint=digest("m1"),
                phase="1",
                step=10,
            ),
        )
    )
    chain.then(
        AppendStream(
            stream="losses",
            lifetime="forever",
            manifest=digest("s1"),
            start=0,
            count=5,
            first_step=1,
            last_step=10,
        ),
        AddCheckpoint(
            manifest=digest("m1"),
            phase="1",
            step=10,
            metrics={"loss": 0.5},
            size_bytes=1234,
            commit_keys=CommitKeys(
                order=("timestamp", "model"), values={"d": [["timestamp", {"f": "0" * 16}]]}
            ),
        ),
        SetPin(
            kind="gate", name="bc_best", manifest=digest("m1"), checkpoint=1, metrics={"loss": 0.5}
        ),
        places=("s1", "m1"),
    )
    chain.then(
        SetPin(kind="artifact", name="seeds", manifest=digest("a1")),
        SetPin(
            kind="release", name="1.0.0", manifest=digest("r1"), checkpoint=1, card=digest("card")
        ),
        SetPin(kind="release", name="1.1.0", manifest=digest("r1")),
        PointRelease(version="1.0.0", reason="1.1.0 is worse"),
        places=("a1", "r1", "card"),
    )
    chain.then(
        EnterPhase(
            from_phase="1",
            to_phase="2",
            source="gates/bc_best",
            manifest=digest("m1"),
            rows=(AppliedRow(part="model", change="freeze", to=None),),
            enabled=("anew",),
            ready={"loss": 0.5},
            companions={"reference": digest("ref")},
        ),
        Promote(
            version=1,
            manifest=digest("p1"),
            gate="bc_best",
            phase="1",
            step=10,
            mu=25.0,
            sigma=8.0,
            frozen=True,
        ),
        AppendStream(
            stream="bandit",
            lifetime="resettable",
            manifest=digest("s2"),
            start=0,
            count=3,
            first_step=1,
            last_step=3,
        ),
        ArchiveStream(stream="bandit", label="before-2"),
        places=("ref", "p1", "s2"),
    )
    for n, step in ((4, 20), (5, 30), (6, 40)):
        chain.then(
            *([TakeOver(token="t0", host="gpu-a")] if n == 4 else []),
            AddCheckpoint(
                manifest=digest(f"m{n}"),
                phase="2",
                step=step,
                size_bytes=n,
                tier="rolling",
                companions={"reference": digest("ref")},
                nonfinite=("model/w",) if n == 6 else None,
                held_back=True if n == 6 else None,
            ),
            Promote(
                version=n - 2,
                manifest=digest(f"p{n}"),
                checkpoint=n,
                phase="2",
                step=step,
                mu=26.0,
                sigma=float(n),
            ),
            *([EvictEntries(versions=(n - 3,), reason="oldest of more than 1")] if n > 4 else []),
            places=(f"m{n}", f"p{n}"),
        )
    chain.then(
        ReportMetrics(checkpoint=5, metrics={"mu": 30.0, "sigma": 1.0}, tier="kept"),
        RateMatch(match="game-1", ratings=(Rated(version=4, mu=27.5, sigma=5.5, games=4, wins=3),)),
        SetTag(name="keeper", checkpoint=5),
        Claim(group="evals", checkpoint=5, follower="f0", until_ms=NOW_MS + 60_000),
        Claim(group="evals", checkpoint=4, follower="f1", until_ms=NOW_MS + 60_000),
        Acknowledge(group="evals", checkpoint=5, follower="f0"),
    )
    chain.then(
        Evict(
            evictions=(
                Eviction(checkpoint=4, reason="not among last 2 of tier rolling; no pin"),
                Eviction(checkpoint=6, reason="for room"),
            )
        )
    )
    chain.then(Recover(checkpoints=(4,)))
    chain.then(Rewind(to=5))
    chain.then(DropRun(reason="a mistake"))
    return chain.slots


class _Chain:
    def __init__(self) -> None:
        self.slots: list[Slot] = []
        self._prev: Digest | None = None

    def then(self, *actions: object, places: tuple[str, ...] = ()) -> None:
        n = len(self.slots)
        commit = Commit(
            n=n,
            run="golden",
            prev=self._prev,
            write=f"{n:016x}",
            author="trainer@host",
            time_ms=NOW_MS + n,
            actions=actions,
        )
        self._prev = line_digest(commit.encode())
        self.slots.append(Slot.build(n, [*map(_place, places), commit]))


def _place(name: str) -> Place:
    return Place(
        manifest=digest(name),
        manifest_generation=0,
        placement=digest(f"placement of {name}"),
        placement_generation=0,
    )


def state() -> RunManifest:
    """Return the run before its end."""
    return advance(RunManifest(run_id="golden"), slots()[:-1])


def files() -> dict[str, bytes]:
    """Return the single files by name."""
    last = state().next_slot - 1
    header = b'{"format":"holdfast.snapshot/1","replay":2,"slot":%d}' % last
    return {
        "log": b"".join(slot.data for slot in slots()),
        "snapshot": join_lines([header, state().encode()]),
        "spec": spec().encode(),
    }


# A whole registry


def states() -> list[dict]:
    """Return four small states of the specification above."""
    return [
        {
            "timestamp": 1000.5 * i,
            "model": {"w": np.arange(40, dtype=np.float32) * i, "b": np.float32([i] * 20)},
            "value": {"v": np.arange(30, dtype=np.float64) + i},
            "schema": 3,
        }
        for i in (1, 2, 3, 4)
    ]


def reference() -> dict:
    return {"model": {"w": np.arange(40, dtype=np.float32) / 2}}


def lived_spec() -> RunSpec:
    """Return the specification of the run that is lived: its phases are entered by saving."""
    return spec().changed(transitions=())


def build_registry(folder: Path) -> None:
    """Live through a short life: companions, evictions, an undo, a gate, a pool, a fork, an end."""
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
        "holdfast.registry.history.log.SNAPSHOT_EVERY": 4,
    }
    patches = [mock.patch(name, value) for name, value in fixed.items()]
    for patch in patches:
        patch.start()
    try:
        _live(folder)
    finally:
        for patch in patches:
            patch.stop()


def _live(folder: Path) -> None:
    first, second, third, fourth = states()
    with holdfast.init(folder, skip_race_probe=True) as reg:
        run = reg.create_run("golden", seed=7, config={"lr": 1e-3}, preset=lived_spec())
        run.save(first, step=10, phase=1, metrics={"loss": 1.0})
        run.pins.gates.set("bc_best")
        run.pins.artifacts.set("seeds", {"bank": np.arange(50, dtype=np.int64)})
        losses = [{"step": step, "loss": 1 / step} for step in range(1, 6)]
        run.save(
            second,
            step=20,
            phase=2,
            companions={"reference": reference()},
            streams={"losses": losses},
        )
        run.save(third, step=30, metrics={"mu": 25.0, "sigma": 2.0, "loss": 1.0})
        run.save(fourth, step=40, streams={"losses": [{"step": 40, "loss": 0.025}]})
        run.retention.undo()
        run.pins.tags.set("keeper", run.latest())
        reg.fork("golden/latest", "fork")
        fork = reg.fork("golden/latest", "dropped")
        fork.handle.committer.commit(lambda _: [DropRun(reason="a mistake")])
        run.status = "completed"
