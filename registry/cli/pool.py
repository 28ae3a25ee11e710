"""`pool promote`, `rate` and `sample`, and the list of a pool: the opponents of a run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import typer

from holdfast.registry.cli import describe, options, output
from holdfast.registry.cli.columns import Column, numbers
from holdfast.registry.cli.command import Answer, answer_of, command, listed
from holdfast.registry.cli.describe import iso, picked
from holdfast.registry.cli.opening import reads, writes
from holdfast.registry.cli.options import argument, flag, option
from holdfast.registry.curation.pool import PoolEntry
from holdfast.registry.face import Registry, Run

_LS = (
    Column("version", text="v{:04d}".format),
    Column("phase", drop=3),
    *numbers("step", drop=2),
    *numbers("mu", "sigma", text="{:.2f}".format),
    *numbers("games", drop=4),
    *numbers("won=win_rate", text="{:.0%}".format, drop=1),
    *numbers("age=promoted", text=describe.age, drop=5),
    Column("marks", text=", ".join, folds=True),
)
_MATCHUPS = (*numbers("game"), Column("opponent", "kind"), Column("version"))
#: Name of the model in training, in place of a version.
_SELF = "self"


def _json(entry: PoolEntry) -> dict[str, Any]:
    rating = "mu sigma conservative games wins win_rate frozen gate evicted"
    return {
        **picked(entry, "ref id=digest run=run_id version phase step"),
        "promoted": iso(entry.record.time_ms),
        **picked(entry, rating),
    }


@command(writes)
def promote(
    opened: Registry,
    *,
    ref: options.Ref,
    mu: float | None = option("--mu", "NUMBER", "Estimated skill; by default its predecessor's."),
    sigma: float | None = option("--sigma", "NUMBER", "Its uncertainty; same default."),
    frozen: bool = flag("--frozen", "Never evict it, and never rate it again."),
) -> Answer:
    """Add the model of a checkpoint to the pool of its run.

    If the pool is full, its oldest entry leaves. A checkpoint that is in the pool already does not
    change.
    """
    checkpoint = opened.checkpoint(ref)
    run = opened.run(checkpoint.run_id)
    entry = run.pool.promote(checkpoint, mu=mu, sigma=sigma, frozen=frozen)
    return answer_of(_json(entry), f"{entry.ref}: {_rating(entry)}{' frozen' * entry.frozen}")


@command(writes)
def rate(
    opened: Registry,
    *,
    run: options.NamedRun,
    seat: list[str] = argument(
        "VERSION:RANK", "Each seat: 12:1 came first; self:2 is the model in training, second."
    ),
    match: str | None = option(
        "--match", "ID", "Its id; a match that is recorded already changes nothing."
    ),
) -> Answer:
    """Record a match: update ratings, games and wins of its entries."""
    versions, ranks = zip(*map(_seat, seat), strict=True)
    rated = opened.run(run).pool.record_match(versions, ranks, match=match)
    return answer_of(
        [_json(entry) for entry in rated],
        *(f"{one.ref}: {_rating(one)} {output.counted(one.games, 'game')}" for one in rated),
    )


@command(reads, table=True)
def sample(
    opened: Registry,
    *,
    run: options.Run,
    start: int = option("--start", "GAME", "Number of the first game.", min=0, default=0),
    count: int = option("-n", "COUNT", "Number of games.", min=1, default=10),
    evaluation: bool = flag("--evaluation", "Which entries to evaluate, by their uncertainty."),
) -> Answer:
    """Show which opponents the model in training plays.

    The same seed and pool always give the same opponents.
    """
    pool, games = opened.run(run).pool, range(start, start + count)
    drawn = [pool.evaluation(n) for n in games] if evaluation else pool.draws(start, count)
    return listed(_MATCHUPS, drawn, lambda one: picked(one, "game kind version"))


def listing(run: Run, *, evicted: bool) -> Answer:
    """Return the entries of a pool as an answer, newest last."""
    entries = run.pool.entries() if evicted else run.pool.roster()
    return listed(
        _LS,
        entries,
        _json,
        more=lambda entry: {"marks": list(_marks(entry))},
        none="no entries yet",
    )


def _seat(text: str) -> tuple[int | None, float]:
    version, colon, rank = text.rpartition(":")
    try:
        if not colon:
            raise ValueError
        return None if version == _SELF else int(version.removeprefix("v")), float(rank)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not of the form VERSION:RANK, as in 12:1 or self:2"
        ) from None


def _marks(entry: PoolEntry) -> Iterable[str]:
    if entry.frozen:
        yield "frozen"
    if entry.gate is not None:
        yield f"gates/{entry.gate}"
    if entry.evicted is not None:
        yield f"left: {entry.evicted}"


def _rating(entry: PoolEntry) -> str:
    return f"mu={output.number(entry.mu)} sigma={output.number(entry.sigma)}"
