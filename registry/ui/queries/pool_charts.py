"""Charts of a pool: its ladder, the ratings over time, who played whom."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.registry.ui.charts import Chart, figure, moment, table
from holdfast.registry.ui.grids import Cell, Grid, diverging_tone
from holdfast.registry.ui.queries.pool import Matches, RatingPoint, Rung

#: The most entries with a curve of their own: those with the highest last ratings.
_CURVES = 8


def ladder_chart(ladder: Iterable[Rung]) -> Chart:
    """Return mu by version, with bands of one and of three sigma; frozen entries are diamonds."""
    rungs = sorted(ladder, key=lambda one: one.version)
    versions = [f"v{one.version}" for one in rungs]
    bands = [
        {
            "type": "scatter",
            "x": [*versions, *versions[::-1]],
            "y": [
                *(one.mu + width * one.sigma for one in rungs),
                *(one.mu - width * one.sigma for one in rungs[::-1]),
            ],
            "fill": "toself",
            "fillcolor": "var(--band)",
            "line": {"width": 0},
            "mode": "lines",
            "hoverinfo": "skip",
            "name": f"mu ± {width} sigma" if width > 1 else "mu ± sigma",
        }
        for width in (3, 1)
    ]
    marks = {
        "type": "scatter",
        "mode": "lines+markers",
        "x": versions,
        "y": [one.mu for one in rungs],
        "customdata": [
            [f"{one.sigma:.2f}", f"{one.conservative:.2f}", _of_games(one)] for one in rungs
        ],
        "line": {"color": "var(--accent)", "width": 1},
        "marker": {
            "size": 10,
            "symbol": ["diamond" if one.frozen else "circle" for one in rungs],
            "color": ["var(--second)" if one.frozen else "var(--accent)" for one in rungs],
        },
        "hovertemplate": "%{x}: mu %{y:.2f}, sigma %{customdata[0]}<br>mu - 3 sigma "
        "%{customdata[1]}<br>%{customdata[2]}<extra></extra>",
        "name": "mu",
    }
    rows = [
        (
            one.place,
            f"v{one.version}",
            f"{one.mu:.2f}",
            f"{one.sigma:.2f}",
            f"{one.conservative:.2f}",
        )
        for one in sorted(rungs, key=lambda one: one.place)
    ]
    return figure(
        "Skill by version",
        f"Estimated skill of {len(rungs)} entries with its uncertainty",
        [*bands, marks],
        {"xaxis": {"type": "category"}, "yaxis": {"title": {"text": "skill"}}, "showlegend": True},
        table(("place", "version", "mu", "sigma", "mu - 3 sigma"), rows),
    )


def ratings_chart(ratings: Iterable[RatingPoint]) -> Chart:
    """Return mu over time, a curve for each of the best entries."""
    curves: dict[int, list[RatingPoint]] = {}
    for point in ratings:
        curves.setdefault(point.version, []).append(point)
    best = sorted(curves, key=lambda version: -curves[version][-1].mu)[:_CURVES]
    traces = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "line": {"shape": "hv", "width": 1.5},
            "marker": {"size": 4},
            "x": [point.time_ms for point in curves[version]],
            "y": [point.mu for point in curves[version]],
            "name": f"v{version}",
            "hovertemplate": "%{y:.2f}<extra>%{fullData.name}</extra>",
        }
        for version in sorted(best)
    ]
    rows = [
        (moment(point.time_ms), f"v{point.version}", f"{point.mu:.2f}", f"{point.sigma:.2f}")
        for version in curves
        for point in curves[version]
    ]
    others = len(curves) - len(best)
    about = f"mu over time of {len(best)} entries"
    return figure(
        "Ratings over time",
        about + (f"; {others} with lower ratings are only in the table" if others else ""),
        traces,
        {"xaxis": {"type": "date"}, "yaxis": {"title": {"text": "mu"}}, "showlegend": True},
        table(("time", "version", "mu", "sigma"), rows),
    )


def matches_grid(matches: Matches) -> Grid:
    """Return the share of their common games that each entry won against each other one."""
    names = tuple(f"v{version}" for version in matches.versions)

    def cell(name: str, other: str, won: int, played: int) -> Cell | None:
        if not played:
            return None
        about = f"{name} won {won:,} of {played:,} games with {other}"
        return Cell(f"{100 * won / played:.0f}%", about, diverging_tone(won / played))

    rows = tuple(
        (
            name,
            (
                *(cell(name, *one) for one in zip(names, wins, games, strict=True)),
                cell(name, "the model in training", alone[1], alone[0]),
            ),
        )
        for name, wins, games, alone in zip(
            names, matches.wins, matches.games, matches.alone, strict=True
        )
    )
    return Grid(
        "Who won against whom",
        f"Share of games that the entry of the row won with the entry of the column, in "
        f"{matches.count:,} matches",
        (*names, "in training"),
        rows,
        ("the row won none", "all of the games with the column"),
        is_diverging=True,
    )


def _of_games(one: Rung) -> str:
    return f"{one.wins:,} of {one.games:,} games won" if one.games else "no games yet"
