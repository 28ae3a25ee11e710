"""The opponent pool of a run as users hold it: promoting, rating, drawing, loading.

The rules are those of `seeds/hydra.md`, Opponent Pool Versioning; their numbers (size, shares of
the draws, models kept loaded) stand in the run's preset. Nothing here needs a writer's token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast.registry.errors import InvalidInput, NotFound
from holdfast.registry.history.actions import Action
from holdfast.registry.history.log_values import check_phase
from holdfast.registry.history.replay import PoolRecord, RunManifest
from holdfast.registry.loading.checkpoint import Checkpoint
from holdfast.registry.names.pins import own
from holdfast.registry.pool.entries import PoolEntry, require_playing, require_record
from holdfast.registry.pool.events import PoolEvent, pool_events
from holdfast.registry.pool.matches import check_match, check_places, check_version, rating_match
from holdfast.registry.pool.model_cache import ModelCache
from holdfast.registry.pool.promoting import PromotionCommit, Source, Terms
from holdfast.registry.pool.promotion import pool_rules
from holdfast.registry.spec.requirements import check_phase_is_declared
from holdfast.registry.spec.seeds import phase_number
from holdfast.registry.values.suggest import near
from holdfast.registry.writing.committer import Committer

if TYPE_CHECKING:
    from holdfast.registry.pool.selection import Matchup


class OpponentPool:
    """The pool of a run, by one handle of it.

    It holds past versions of the model for the one in training to play against. Versions are
    numbers from 1 that only grow: none is given twice in a run, whatever is evicted or restarted.

    Args:
        committer: Of the run's handle.
    """

    def __init__(self, committer: Committer) -> None:
        self._committer = committer
        self._store = committer.store
        self._log = committer.log
        self._models: ModelCache[_Loaded] = ModelCache(pool_rules(self._log.run).cache)

    # Letting models in

    def promote(
        self,
        checkpoint: Checkpoint,
        *,
        mu: float | None = None,
        sigma: float | None = None,
        frozen: bool = False,
    ) -> PoolEntry:
        """Let a model into the pool: what inference needs of a checkpoint, no weights copied.

        The oldest entry that is not frozen leaves for it when the pool is full, in the same commit.

        Args:
            checkpoint: Of this run. A frozen one that is a gate is drawn by the gate's name; where
                it is several gates, `promote_gate` says which.
            mu: Estimated skill of the model. Without it that of the checkpoint's metrics, else of
                the newest checkpoint that has a rating; a frozen one has its own or the default.
            sigma: Uncertainty of that, likewise. It enters as at least a third of the default,
                unless the entry is frozen.
            frozen: Whether it stays for good, with the rating that it has.

        Returns:
            The entry. Where the same checkpoint plays in the same role already that one, as it is:
            repeating a promotion whose answer was lost is safe.

        Raises:
            InvalidInput: The checkpoint is another run's, its weights hold NaN, or a number is no
                rating.
            IncompatibleState: The checkpoint has nothing of what inference needs.
            Conflict: The checkpoint was evicted, or the run dropped.
        """

        def source(run: RunManifest) -> Source:
            n = own(self._committer, checkpoint, "the pool")
            record = run.by_n.get(n) or self._log.knowing(n).by_n[n]
            gates = [pin.name for pin in run.pins_of("gate") if pin.checkpoint == record.n]
            return Source(record, gates[0] if frozen and gates else None)

        return self._promote(source, Terms(frozen, mu, sigma))

    def promote_gate(
        self, name: str, *, mu: float | None = None, sigma: float | None = None
    ) -> PoolEntry:
        """Let a gate into the pool as a frozen entry: never evicted, never rated again.

        Args:
            name: The gate; the entry is drawn by this name.
            mu: Estimated skill, for good; of the gate's metrics or the default without it.
            sigma: Uncertainty of that, likewise.

        Raises:
            NotFound: The gate is not set.
            InvalidInput: A number is no rating.
            IncompatibleState: The gate has nothing of what inference needs.
        """

        def source(run: RunManifest) -> Source:
            pin = run.pin("gate", name)
            if pin is None or pin.checkpoint is None:
                known = [one.name for one in run.pins_of("gate")]
                where = f"{run.run_id}/gates/{name}"
                raise NotFound("no such gate", where=where, hint=near(name, known))
            n = pin.checkpoint
            return Source(run.by_n.get(n) or self._log.knowing(n).by_n[n], name)

        return self._promote(source, Terms(frozen=True, mu=mu, sigma=sigma))

    def _promote(self, source: Callable[[RunManifest], Source], terms: Terms) -> PoolEntry:
        promotion = PromotionCommit(self._committer, source, terms)
        self._log.refresh()
        self._committer.commit(promotion)
        return self._entry(self._known(promotion.version))

    # Looking at it

    def roster(self) -> list[PoolEntry]:
        """Return the entries that play, frozen ones included, as of now, oldest first."""
        return [self._entry(record) for record in self._log.refresh().roster()]

    def entries(self) -> list[PoolEntry]:
        """Return every entry that there ever was, as of now, oldest first."""
        self._log.refresh()
        return [self._entry(record) for record in self._log.history().pool]

    def entry(self, version: int) -> PoolEntry:
        """Return an entry that plays.

        Raises:
            NotFound: There never was one of this version, or it left the pool; the message says
                why.
            InvalidInput: It is no version.
        """
        number = check_version(version)
        self._log.refresh()
        return self._entry(require_playing(self._log.knowing_entry(number), number))

    def history(self, version: int) -> list[PoolEvent]:
        """Return what became of an entry, oldest first: every rating, also after it has gone.

        Raises:
            NotFound: There never was one of this version.
            InvalidInput: It is no version.
        """
        number = check_version(version)
        self._log.refresh()
        self._known(number)
        return self.histories()[number]

    def histories(self) -> dict[int, list[PoolEvent]]:
        """Return what became of every entry, by version, oldest first; the log is read once."""
        found: dict[int, list[PoolEvent]] = {}
        for event in self._events():
            found.setdefault(event.version, []).append(event)
        return found

    def evictions(self) -> list[PoolEvent]:
        """Return what left the pool, in that order, each with its last rating and the reason."""
        return [event for event in self._events() if event.event == "evicted"]

    def _known(self, version: int) -> PoolRecord:
        return require_record(self._log.knowing_entry(version), version)

    def _events(self) -> Iterable[PoolEvent]:
        return pool_events(commit for slot in self._log.slots() for _, commit in slot.commits)

    # Playing

    def record_match(
        self,
        versions: Sequence[int | None],
        ranks: Sequence[float],
        *,
        match: str | None = None,
    ) -> list[PoolEntry]:
        """Record a match: OpenSkill's PlackettLuce rates the entries that took part.

        Each of them has played one more game. It has won if it came first alone: of those who tie
        for the first rank nobody has. Frozen entries count their games and keep their rating. An
        entry that left the pool during its match is rated all the same.

        Args:
            versions: Who sat where; `None` is the model in training, which plays with its newest
                rating and is not rated here. Who held several seats plays once, by the mean of
                their ranks.
            ranks: Where each seat came in, in the same order. Lower is better, equal is a tie.
            match: Identity of the match: recorded again it changes nothing, as long as it is among
                the newest 256. Random without it, so that repeating the call counts twice.

        Returns:
            The entries, in the order in which `versions` names them first.

        Raises:
            InvalidInput: Versions and ranks do not fit each other, or fewer than two different
                players took part.
            NotFound: The pool never had one of the versions.
            Conflict: The run was dropped.
        """
        places, name = check_places(versions, ranks), check_match(match)
        players = [player for player in places if player is not None]

        def compose(run: RunManifest) -> Sequence[Action] | None:
            return None if name in run.matches else [rating_match(run, places, name)]

        self._log.refresh()
        self._committer.commit(compose)
        return [self._entry(self._known(player)) for player in players]

    def draw(self, game: int, *, phase: int | str | None = None) -> Matchup:
        """Return the opponent of a game: the same one for the same seed, game and pool.

        Args:
            game: Number of the game within the phase, from 0.
            phase: Phase that is played; the pool's own without it.

        Raises:
            InvalidInput: The run's preset declares no opponents, or there is no such phase.
        """
        (matchup,) = self.draws(game, 1, phase=phase)
        return matchup

    def draws(self, start: int, count: int, *, phase: int | str | None = None) -> list[Matchup]:
        """Return the opponents of `count` games from number `start` on, each one as `draw` does.

        The pool is the one that this handle has read last: it changes by what is promoted here,
        and by `roster` and `Run.refresh`, never by itself between two games. What may be drawn of
        it: every entry that is not frozen, oldest first; and of each gate that the preset names
        the newest frozen entry.

        Raises:
            InvalidInput: The run's preset declares no opponents, or there is no such phase.
        """
        from holdfast.registry.pool import (
            selection,  # here, for it needs NumPy: `import holdfast` is light
        )

        run = self._log.run
        rules, created = pool_rules(run), run.created
        if not rules.draws or created is None:
            raise InvalidInput(
                "the run's preset declares no opponents to draw",
                where=run.run_id,
                expected="draws in the preset's [pool]",
            )
        playing, name = run.roster(), rules.phase if phase is None else check_phase(phase)
        check_phase_is_declared(run.spec, name)
        return selection.draws(
            int(created.seed, 16),
            phase_number(run.spec, name),
            rules.seed_child,
            [selection.Category(one.kind, one.weight, one.name) for one in rules.draws],
            [entry.version for entry in playing if not entry.frozen],
            {entry.gate: entry.version for entry in playing if entry.frozen and entry.gate},
            start=start,
            count=count,
        )

    def load(
        self,
        version: int,
        *,
        build: Callable[[Any], Any] | None = None,
        map_location: object = "cpu",
    ) -> Any:
        """Return the model of an entry; the most recently used ones are kept in memory.

        How many is said by the preset. What is returned is shared by all who ask for the version:
        play with it, do not change it. One that left the pool may still be played from memory.

        Args:
            version: Which.
            build: Makes of the loaded state what is wanted, for example a model in half precision;
                called once for each version that is loaded. Give the same one every time: a model
                in memory is not built again because another one is given.
            map_location: Device for the tensors, as `torch.device` or its name.

        Returns:
            What `build` returned; without it the state.

        Raises:
            NotFound: There never was such an entry, or it left the pool.
            InvalidInput: It is no version.
            IntegrityError: Something of it is damaged or gone; nothing is kept of it then.
        """
        number = check_version(version)
        wanted = (str(map_location), build is not None)

        def load() -> _Loaded:
            state = self.entry(number).load(map_location=map_location)
            return _Loaded(wanted, state if build is None else build(state))

        while (held := self._models.get(number, load)).kind != wanted:
            self._models.drop(number)
        return held.model

    def _entry(self, record: PoolRecord) -> PoolEntry:
        return PoolEntry(self._store, self._log, record)


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A model in memory: device and whether it was built, so that no other one passes for it."""

    kind: tuple[str, bool]
    model: Any
