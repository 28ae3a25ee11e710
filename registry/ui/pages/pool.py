"""The pool of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.registry.history.actions import Commit, EvictEntries, Promote, RateMatch
from holdfast.registry.history.replay import PoolRecord
from holdfast.registry.ui.charts import Cell, Chart, Grid, Moment, diverging_tone, figure, table
from holdfast.registry.ui.pages.view import Asked, Shown, View
from holdfast.registry.ui.source import Source

#: Number of the log's newest slots to read for matches and evictions.
SLOTS_READ = 256
#: Maximum number of versions in the matrix of matches: the last ones that played.
PLAYERS = 40
#: The newest evictions, and the newest ratings of the curves, that are shown.
EVICTIONS, RATINGS = 200, 5000


@dataclass(frozen=True, slots=True)
class RatingPoint:
    """The rating of an entry from one moment on."""

    version: int
    time_ms: int
    mu: float
    sigma: float


@dataclass(frozen=True, slots=True)
class Gone:
    """An entry that left the pool."""

    version: int
    time_ms: int  # when it left, by the author's clock
    reason: str  # why
    mu: float | None  # its last rating, if the slots that were read have one
    sigma: float | None


@dataclass(frozen=True, slots=True)
class Matches:
    """The matches of a pool, as a matrix."""

    versions: tuple[int, ...]  # the last versions that played, ascending
    #: For each version, the number of games together with each version.
    games: tuple[tuple[int, ...], ...]
    #: For each version, the number of these games that it won: it alone came first.
    wins: tuple[tuple[int, ...], ...]
    #: For each version, games and wins in which no other entry took part: the model in training was
    #: its opponent.
    alone: tuple[tuple[int, int], ...]
    count: int  # number of matches that were read
    hidden: int  # number of versions that played and are not among `versions`


@dataclass(frozen=True, slots=True)
class PoolView:
    """The pool of a run."""

    run: str
    size: int | None  # maximum number of entries that are not frozen; `None` without a bound
    #: The entries that play, the highest conservative rating first.
    ladder: tuple[PoolRecord, ...]
    #: The ratings in the order of the log, of entries that play and that left.
    ratings: tuple[RatingPoint, ...]
    matches: Matches  # who played whom
    gone: tuple[Gone, ...]  # the newest entries that left, newest first
    gone_count: int  # number of entries that left, in the slots that were read
    is_live: bool  # whether the run is running
    commits: int  # number of its commits
    slots: int  # number of slots of the log
    slots_read: int  # number of slots that were read, the newest


def pool_view(source: Source, run_id: str, *, everything: bool = False) -> PoolView:
    """Return the pool of a run."""
    run = source.run(run_id).manifest
    log, read = _Played(), 0
    if run.next_version > 1:  # without a promotion there is nothing to find in the log
        most = run.next_slot if everything else SLOTS_READ
        chronicle = source.chronicle(run_id, most=most)
        for error in chronicle.errors:
            raise error
        for commit in chronicle.commits:
            log.take(commit)
        read = chronicle.next_slot - chronicle.first_slot
    rules = run.spec.pool
    return PoolView(
        run_id,
        None if rules is None else rules.size,
        tuple(sorted(run.roster(), key=lambda one: (-one.conservative, one.version))),
        tuple(log.ratings[-RATINGS:]),
        log.matches(),
        tuple(reversed(log.gone[-EVICTIONS:])),
        len(log.gone),
        run.status == "running",
        run.commits,
        run.next_slot,
        read,
    )


class _Played:
    """Ratings, matches and evictions of a pool, from the commits of its run."""

    def __init__(self) -> None:
        self.ratings: list[RatingPoint] = []
        self.gone: list[Gone] = []
        self._last: dict[int, RatingPoint] = {}
        self._games: Counter[tuple[int, int]] = Counter()
        self._wins: Counter[tuple[int, int]] = Counter()
        self._alone: Counter[int] = Counter()
        self._won_alone: Counter[int] = Counter()
        self._newest: dict[int, None] = {}
        self._count = 0

    def take(self, commit: Commit) -> None:
        """Take the next commit of the log."""
        for action in commit.actions:
            match action:
                case Promote():
                    self._rated(action.version, commit.time_ms, action.mu, action.sigma)
                case RateMatch():
                    self._match(action)
                    for one in action.ratings:
                        self._rated(one.version, commit.time_ms, one.mu, one.sigma)
                case EvictEntries():
                    for version in action.versions:
                        last = self._last.get(version)
                        rating = (None, None) if last is None else (last.mu, last.sigma)
                        self.gone.append(Gone(version, commit.time_ms, action.reason, *rating))

    def _rated(self, version: int, time_ms: int, mu: float, sigma: float) -> None:
        point = RatingPoint(version, time_ms, mu, sigma)
        self._last[version] = point
        self.ratings.append(point)

    def _match(self, action: RateMatch) -> None:
        self._count += 1
        for one in action.ratings:
            self._newest.pop(one.version, None)
            self._newest[one.version] = None
            for other in action.ratings:
                if other.version != one.version:
                    self._games[one.version, other.version] += one.games
                    self._wins[one.version, other.version] += one.wins
        if len(action.ratings) == 1:
            (one,) = action.ratings
            self._alone[one.version] += one.games
            self._won_alone[one.version] += one.wins

    def matches(self) -> Matches:
        """Return the matrix of matches."""
        versions = sorted(list(self._newest)[-PLAYERS:])
        games, wins = (
            tuple(tuple(found[one, other] for other in versions) for one in versions)
            for found in (self._games, self._wins)
        )
        alone = tuple((self._alone[one], self._won_alone[one]) for one in versions)
        hidden = len(self._newest) - len(versions)
        return Matches(tuple(versions), games, wins, alone, self._count, hidden)


# Charts of a pool: its ladder, the ratings over time, who played whom.


#: Maximum number of entries with a curve: the highest last ratings.
_CURVES = 8


def _bands(entries: Sequence[PoolRecord], versions: Sequence[str]) -> list[dict[str, Any]]:
    """Return the areas of three sigma and of one around mu."""
    return [
        {
            "type": "scatter",
            "x": [*versions, *versions[::-1]],
            "y": [
                *(one.mu + width * one.sigma for one in entries),
                *(one.mu - width * one.sigma for one in entries[::-1]),
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


def _marks(entries: Sequence[PoolRecord], versions: Sequence[str]) -> dict[str, Any]:
    """Return mu of each entry as a point, with its numbers as text for the pointer."""
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "x": versions,
        "y": [one.mu for one in entries],
        "customdata": [
            [f"{one.sigma:.2f}", f"{one.conservative:.2f}", _of_games(one)] for one in entries
        ],
        "line": {"color": "var(--accent)", "width": 1},
        "marker": {
            "size": 10,
            "symbol": ["diamond" if one.frozen else "circle" for one in entries],
            "color": ["var(--second)" if one.frozen else "var(--accent)" for one in entries],
        },
        "hovertemplate": "%{x}: mu %{y:.2f}, sigma %{customdata[0]}<br>mu - 3 sigma "
        "%{customdata[1]}<br>%{customdata[2]}<extra></extra>",
        "name": "mu",
    }


def ladder_chart(ladder: Sequence[PoolRecord]) -> Chart:
    """Return mu by version, with bands of one and of three sigma; frozen entries are diamonds."""
    entries = sorted(ladder, key=lambda one: one.version)
    versions = [f"v{one.version}" for one in entries]
    rows = [
        (place, f"v{one.version}", *(f"{it:.2f}" for it in (one.mu, one.sigma, one.conservative)))
        for place, one in enumerate(ladder, start=1)
    ]
    return figure(
        "Skill by version",
        f"Estimated skill of {len(entries)} entries with its uncertainty",
        [*_bands(entries, versions), _marks(entries, versions)],
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
        (Moment(point.time_ms), f"v{point.version}", f"{point.mu:.2f}", f"{point.sigma:.2f}")
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


def _of_games(one: PoolRecord) -> str:
    return f"{one.wins:,} of {one.games:,} games won" if one.games else "no games yet"


@dataclass(frozen=True, slots=True)
class PoolPage:
    """Page of an opponent pool."""

    pool: PoolView
    ladder: Chart | None  # skill by version; `None` if nobody plays
    ratings: Chart | None  # ratings over time; `None` if none were read
    matches: Grid | None  # who won against whom; `None` if no match was read


def _ask(source: Source, asked: Asked) -> Shown:
    name = asked.text("run")
    pool = pool_view(source, name, everything=asked.text("slots") == "all")
    page = PoolPage(
        pool,
        ladder_chart(pool.ladder) if pool.ladder else None,
        ratings_chart(pool.ratings) if pool.ratings else None,
        matches_grid(pool.matches) if pool.matches.count else None,
    )
    return Shown(name, page, live={name: pool.commits} if pool.is_live else {}, run=name)


def _parts(source: Source, runs: Sequence[str]) -> Iterable[Asked]:
    for name, run in source.runs(runs).runs.items():
        if run.manifest.next_version > 1:
            yield Asked(path={"run": name})


VIEW = View("pool", "Pool", "/runs/{run}/pool", "pool.html", _ask, place="run", parts=_parts)
