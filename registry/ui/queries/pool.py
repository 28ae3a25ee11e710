"""The pool of a run: who plays, how ratings changed, who played whom, who left.

The ladder comes from the run as it is open. Matches and evictions are in the log: its newest slots
are read, or all of them where that is asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from holdfast.registry.history.actions import Commit, EvictEntries, Promote, RateMatch
from holdfast.registry.history.replay import PoolRecord
from holdfast.registry.ui.source import Source
from holdfast.registry.values.digest import Digest

#: The newest slots of a log that are read for matches and evictions.
SLOTS_READ = 256
#: The most versions of the matrix of matches: those that played last.
PLAYERS = 40
#: The newest evictions, and the newest ratings of the curves, that are shown.
EVICTIONS, RATINGS = 200, 5000


@dataclass(frozen=True, slots=True)
class Rung:
    """An entry that plays.

    Attributes:
        place: Its place on the ladder, from 1.
        version: Its number.
        ref: Its ref.
        id: Its id.
        phase: Phase of its checkpoint.
        step: Step of its checkpoint.
        mu: Estimated skill, in points.
        sigma: Its uncertainty, in points.
        games: Games played.
        wins: Games won.
        frozen: Whether it is never evicted and never rated again.
        gate: The gate that it was made from.
        promoted_ms: When it was promoted, by the promoter's clock.
    """

    place: int
    version: int
    ref: str
    id: Digest
    phase: str
    step: int
    mu: float
    sigma: float
    games: int
    wins: int
    frozen: bool
    gate: str | None
    promoted_ms: int

    @property
    def conservative(self) -> float:
        """A low estimate of its skill: mu - 3 sigma."""
        return self.mu - 3 * self.sigma


@dataclass(frozen=True, slots=True)
class RatingPoint:
    """The rating of an entry from one moment on."""

    version: int
    time_ms: int
    mu: float
    sigma: float


@dataclass(frozen=True, slots=True)
class Gone:
    """An entry that left the pool.

    Attributes:
        version: Its number.
        time_ms: When it left, by the author's clock.
        reason: Why.
        mu: Its last rating, where the part of the log that was read has one.
        sigma: Its uncertainty.
    """

    version: int
    time_ms: int
    reason: str
    mu: float | None
    sigma: float | None


@dataclass(frozen=True, slots=True)
class Matches:
    """Who played whom.

    Attributes:
        versions: Those that played last, ascending.
        games: For each version, the games that it played together with each of them.
        wins: For each version, how many of these games it won: it came first alone.
        alone: For each version, games and wins in which no other entry took part: the model in
            training was its opponent.
        count: Number of matches that were read.
        hidden: Number of versions that played and are not among `versions`.
    """

    versions: tuple[int, ...]
    games: tuple[tuple[int, ...], ...]
    wins: tuple[tuple[int, ...], ...]
    alone: tuple[tuple[int, int], ...]
    count: int
    hidden: int


@dataclass(frozen=True, slots=True)
class PoolView:
    """The pool of a run.

    Attributes:
        run: The run.
        size: The most entries that are not frozen; `None` without a bound.
        ladder: The entries that play, the highest conservative rating first.
        ratings: The ratings in the order of the log, of entries that play and that left.
        matches: Who played whom.
        gone: The newest entries that left, newest first.
        gone_count: How many left in the part of the log that was read.
        is_live: Whether the run is running.
        commits: Number of its commits.
        slots: Number of slots of the log.
        slots_read: How many of them, the newest, were read.
    """

    run: str
    size: int | None
    ladder: tuple[Rung, ...]
    ratings: tuple[RatingPoint, ...]
    matches: Matches
    gone: tuple[Gone, ...]
    gone_count: int
    is_live: bool
    commits: int
    slots: int
    slots_read: int


def pool_view(source: Source, run_id: str, *, everything: bool = False) -> PoolView:
    """Return the pool of a run.

    Args:
        source: The registry.
        run_id: The run.
        everything: Read the whole log, and not only its newest slots.

    Raises:
        NotFound: There is no such run.
        IntegrityError: Its log is damaged.
    """
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
        _ladder(run_id, run.roster()),
        tuple(log.ratings[-RATINGS:]),
        log.matches(),
        tuple(reversed(log.gone[-EVICTIONS:])),
        len(log.gone),
        run.status == "running",
        run.commits,
        run.next_slot,
        read,
    )


def _ladder(run_id: str, playing: Iterable[PoolRecord]) -> tuple[Rung, ...]:
    ranked = sorted(playing, key=lambda one: (3 * one.sigma - one.mu, one.version))
    return tuple(
        Rung(
            place,
            one.version,
            f"{run_id}/pool/v{one.version:04d}",
            one.manifest,
            one.phase,
            one.step,
            one.mu,
            one.sigma,
            one.games,
            one.wins,
            one.frozen,
            one.gate,
            one.time_ms,
        )
        for place, one in enumerate(ranked, start=1)
    )


class _Played:
    """What commits say of a pool."""

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
        """Return who played whom."""
        versions = sorted(list(self._newest)[-PLAYERS:])
        games, wins = (
            tuple(tuple(found[one, other] for other in versions) for one in versions)
            for found in (self._games, self._wins)
        )
        alone = tuple((self._alone[one], self._won_alone[one]) for one in versions)
        hidden = len(self._newest) - len(versions)
        return Matches(tuple(versions), games, wins, alone, self._count, hidden)
