"""Writers and collectors at once on one registry, each with a recorded store of its own."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread

import numpy as np

from holdfast.backends import Backend
from holdfast.registry.errors import Conflict, IntegrityError, NotFound
from holdfast.registry.face.factory import open_on
from holdfast.registry.face.registry import Registry
from holdfast.registry.spec import Phase, Retention, RunSpec
from tests.traces.recording import Recorded

RUNS = ("one", "two")
_CONTENTS = 5
_SPEC = RunSpec(phases=(Phase(name="main", retention=Retention(last=1)),))


def state_of(number: int) -> dict[str, object]:
    """Return one of few states, so that one is often saved that was evicted before."""
    weights = np.random.default_rng(number % _CONTENTS).standard_normal(4_000)
    return {"model": {"weights": weights}, "shared": {"table": np.arange(3_000.0)}}


def live(
    open_store: Callable[[], Backend],
    folder: Path,
    *,
    turns: int,
    writers: int = 2,
    collectors: int = 1,
) -> None:
    """Let writers save, fork, undo and repack, and collectors collect; write the trace."""
    folder.mkdir(exist_ok=True)
    with open_on(Recorded(open_store(), folder)) as reg:
        for name in RUNS:
            reg.create_run(name, seed=1, preset=_SPEC)
    errors: list[BaseException] = []

    def work(turn: Callable[[Registry, random.Random, int], None], seed: int) -> None:
        try:
            with open_on(Recorded(open_store(), folder)) as reg:
                chance = random.Random(seed)
                for number in range(turns):
                    # The errors of others who were faster.
                    with suppress(Conflict, NotFound, IntegrityError):
                        turn(reg, chance, number)
        except BaseException as error:
            errors.append(error)

    acts: Sequence[Callable[[Registry, random.Random, int], None]] = [
        *[_write] * writers,
        *[_collect] * collectors,
    ]
    threads = [Thread(target=work, args=(act, seed)) for seed, act in enumerate(acts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    with open_on(Recorded(open_store(), folder)) as reg:
        reg.gc(grace_s=0)
        assert list(reg.verify(deep=True).findings) == []


def _write(reg: Registry, chance: random.Random, number: int) -> None:
    run = reg.run(chance.choice(RUNS))
    state, step = state_of(chance.randrange(_CONTENTS)), chance.getrandbits(40)
    match chance.randrange(8):
        case 0 if gone := run.retention.evicted():
            run.retention.undo(gone[-1])
        case 1 if kept := run.checkpoints():
            reg.fork(kept[-1], f"fork-{step}")
        case 2:
            reg.repack([run.id])
        case _:
            run.exchange.push(state, step=step)


def _collect(reg: Registry, chance: random.Random, number: int) -> None:
    reg.gc(grace_s=0)
