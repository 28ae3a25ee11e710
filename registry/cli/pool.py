"""`pool promote`, `pool rate`, `pool sample` and `pool ls`: a run's opponents."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import typer

from registry.cli import describe, options, output
from registry.cli.columns import Column
from registry.pool.entries import PoolEntry
from registry.registry import open  # noqa: A004

_LS = (
    Column("version"),
    Column("phase"),
    Column("step", is_number=True),
    Column("mu", is_number=True),
    Column("sigma", is_number=True),
    Column("games", is_number=True),
    Column("won", is_number=True),
    Column("age", is_number=True),
    Column("marks", folds=True),
)
_MATCHUPS = (Column("game", is_number=True), Column("opponent"), Column("version"))
#: How the model in training is called where a version is asked for.
_SELF = "self"


def promote(
    ref: options.Ref,
    registry: options.Registry,
    *,
    mu: Annotated[
        float | None, typer.Option(metavar="NUMBER", help="Estimated skill; inherited without it.")
    ] = None,
    sigma: Annotated[
        float | None, typer.Option(metavar="NUMBER", help="Its uncertainty; likewise.")
    ] = None,
    frozen: Annotated[
        bool, typer.Option("--frozen", help="Never evict it, and never rate it again.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Let a checkpoint's model into the pool of its run.

    The oldest entry leaves where the pool is full. A checkpoint that plays already stays what it
    is.
    """
    with open(registry) as opened:
        checkpoint = opened.checkpoint(ref)
        run = opened.run(checkpoint.run_id)
        entry = run.pool.promote(checkpoint, mu=mu, sigma=sigma, frozen=frozen)
    if json:
        output.document(_shape(entry))
    else:
        output.line(f"{entry.ref}: {_rating(entry)}{' frozen' if entry.frozen else ''}")


def rate(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name of a run.")],
    seat: Annotated[
        list[str],
        typer.Argument(
            metavar="VERSION:RANK",
            help="Each seat: 12:1 came first; self:2 is the model in training, second.",
        ),
    ],
    registry: options.Registry,
    *,
    match: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Its identity: recorded again it changes nothing."),
    ] = None,
    json: options.Json = False,
) -> None:
    """Record a match: ratings, games and wins of the entries that took part."""
    versions, ranks = zip(*map(_seat, seat), strict=True)
    with open(registry) as opened:
        rated = opened.run(run).pool.record_match(versions, ranks, match=match)
    if json:
        output.document([_shape(entry) for entry in rated])
        return
    for entry in rated:
        output.line(f"{entry.ref}: {_rating(entry)} {output.counted(entry.games, 'game')}")


def sample(
    run: options.Run,
    registry: options.Registry,
    *,
    start: Annotated[int, typer.Option(min=0, metavar="GAME", help="Number of the first.")] = 0,
    count: Annotated[int, typer.Option("-n", min=1, metavar="COUNT", help="How many games.")] = 10,
    json: options.Json = False,
) -> None:
    """Show whom the model in training plays: the same opponents for the same seed and pool."""
    with open(registry, read_only=True) as opened:
        drawn = opened.run(run).pool.draws(start, count)
    if json:
        output.document(
            [{"game": one.game, "kind": one.kind, "version": one.version} for one in drawn]
        )
        return
    rows = [(one.game, one.kind, "" if one.version is None else one.version) for one in drawn]
    output.table(_MATCHUPS, rows)


def ls(
    run: options.Run,
    registry: options.Registry,
    *,
    everything: Annotated[
        bool, typer.Option("--all", help="Also the entries that left the pool.")
    ] = False,
    json: options.Json = False,
) -> None:
    """List the entries of a pool, newest last."""
    with open(registry, read_only=True) as opened:
        pool = opened.run(run).pool
        entries = pool.entries() if everything else pool.roster()
    if json:
        output.document([_shape(entry) for entry in entries])
    elif not entries:
        output.note("no entries yet")
    else:
        output.table(_LS, [_row(entry) for entry in entries])


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


def _shape(entry: PoolEntry) -> dict[str, Any]:
    return {
        "ref": entry.ref,
        "id": entry.digest,
        "run": entry.run_id,
        "version": entry.version,
        "phase": entry.phase,
        "step": entry.step,
        "promoted": describe.iso(entry.record.time_ms),
        "mu": entry.mu,
        "sigma": entry.sigma,
        "conservative": entry.conservative,
        "games": entry.games,
        "wins": entry.wins,
        "win_rate": entry.win_rate,
        "frozen": entry.frozen,
        "gate": entry.gate,
        "evicted": entry.evicted,
    }


def _row(entry: PoolEntry) -> tuple[object, ...]:
    return (
        f"v{entry.version:04d}",
        entry.phase,
        entry.step,
        f"{entry.mu:.2f}",
        f"{entry.sigma:.2f}",
        entry.games,
        "" if entry.win_rate is None else f"{entry.win_rate:.0%}",
        output.age(entry.record.time_ms),
        ", ".join(_marks(entry)),
    )


def _marks(entry: PoolEntry) -> Iterable[str]:
    if entry.frozen:
        yield "frozen"
    if entry.gate is not None:
        yield f"gates/{entry.gate}"
    if entry.evicted is not None:
        yield f"left: {entry.evicted}"


def _rating(entry: PoolEntry) -> str:
    return f"mu={output.number(entry.mu)} sigma={output.number(entry.sigma)}"
