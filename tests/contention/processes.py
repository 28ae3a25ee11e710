"""Processes that all begin at once, and what each of them does."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from typing import Any

import holdfast
from holdfast.registry.errors import Fenced
from holdfast.registry.face.registry import Registry
from tests.support.processes import servers, start_telling
from tests.support.states import make_state

_PATIENCE_S = 300

#: What a process does: given the registry, its number, the barrier and further arguments.
Work = Callable[..., Any]


def all_at_once(url: str, work: Work, processes: int, *arguments: Any) -> list[Any]:
    """Let processes work on one registry at once, and return what each of them has to tell."""
    barrier = servers().Barrier(processes)
    began = [
        start_telling(_work, url, work, number, barrier, arguments) for number in range(processes)
    ]
    told = [hearing.recv() for _, hearing in began]
    for worker, _ in began:
        worker.join(_PATIENCE_S)
        worker.close()
    for fine, answer in told:
        assert fine, answer
    return [answer for _, answer in told]


def _work(
    url: str,
    work: Work,
    number: int,
    barrier: Barrier,
    arguments: tuple[Any, ...],
    sending: Connection,
) -> None:
    try:
        with holdfast.open(url) as reg:
            sending.send((True, work(reg, number, barrier, *arguments)))
    except BaseException:
        barrier.abort()
        sending.send((False, traceback.format_exc()))


def annotate(reg: Registry, number: int, barrier: Barrier, run_id: str, commits: int) -> list[str]:
    """Report and tag, by turns; return the names of what was acknowledged."""
    run = reg.run(run_id)
    checkpoint = run.latest()
    assert checkpoint is not None
    barrier.wait(_PATIENCE_S)
    names = [f"w{number}c{commit}" for commit in range(commits)]
    for commit, name in enumerate(names):
        if commit % 2:
            run.pins.tags.set(name, checkpoint)
        else:
            checkpoint.report({name: float(commit)})
    return names


def train(reg: Registry, number: int, barrier: Barrier, run_id: str) -> str:
    """Save once, and once more when every other trainer has saved; return how that went."""
    run = reg.run(run_id)
    barrier.wait(_PATIENCE_S)
    run.save(make_state(number), step=1, phase=f"of{number}")
    barrier.wait(_PATIENCE_S)
    try:
        run.save(make_state(100 + number), step=2, phase=f"of{number}")
    except Fenced:
        return "fenced"
    return "in charge"


def begin(reg: Registry, number: int, barrier: Barrier, run_id: str) -> tuple[str, int]:
    """Begin the run that all others begin as well; return what it was begun with here."""
    barrier.wait(_PATIENCE_S)
    run = reg.run(run_id, create=True, seed=1, config={"begun by": number})
    return run.id, run.config["begun by"]


def save_the_same(reg: Registry, number: int, barrier: Barrier, step: int) -> str:
    """Save in a run of this process's own what all others save in theirs; return the id."""
    run = reg.create_run(f"run{number}", seed=number)
    barrier.wait(_PATIENCE_S)
    return run.save(make_state(step), step=step).digest.hex()
