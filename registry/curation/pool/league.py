"""The opponent pool of a run: promote, rate, draw and load models.

The rules come from Hydra's document, Opponent Pool Versioning; the run's preset gives their numbers
(size, shares of the draws, models kept loaded). Nothing here needs a writer token.
Loaded models are cached; the caller decides what a model is and how it is loaded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future
from threading import Lock
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from holdfast.registry.curation.pins import find_pin, own
from holdfast.registry.curation.pool.entries import PoolEntry, require_playing, require_record
from holdfast.registry.curation.pool.matches import (
    PoolEvent,
    check_match,
    check_ranks,
    check_version,
    pool_events,
    rating_match,
)
from holdfast.registry.curation.pool.promoting import (
    ModelSource,
    PromotionCommit,
    Terms,
    pool_rules,
)
from holdfast.registry.errors import InvalidInput, NotFound
from holdfast.registry.history import check_phase
from holdfast.registry.history.actions import Action
from holdfast.registry.history.replay import PoolRecord, RunManifest
from holdfast.registry.loading import Checkpoint
from holdfast.registry.spec import check_phase_is_declared, phase_number
from holdfast.registry.values import markup
from holdfast.registry.writing import Committer

if TYPE_CHECKING:
    from holdfast.registry.curation.pool.selection import Matchup

T = TypeVar("T")


class ModelCache(Generic[T]):
    """At most `capacity` models by their versions; the least recently used one is dropped first.

    Any number of threads may use it. The cache never holds more than `capacity` models. More may be
    in memory: models that are being loaded, and dropped ones that a caller still holds.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._lock = Lock()
        self._held: OrderedDict[int, T] = OrderedDict()
        self._loading: dict[int, Future[T]] = {}

    def get(self, version: int, load: Callable[[], T]) -> T:
        """Return the model of a version; load it if the cache does not hold it.

        If another thread is loading the same version, the call waits for it, and raises its error;
        after an interrupt there (`KeyboardInterrupt`, `SystemExit`) it loads the model itself.
        """
        while True:
            with self._lock:
                if version in self._held:
                    self._held.move_to_end(version)
                    return self._held[version]
                awaited = self._loading.get(version)
                if awaited is None:
                    mine = self._loading[version] = Future()
            if awaited is None:
                return self._load(version, load, mine)
            try:
                return awaited.result()
            except CancelledError:
                if not awaited.cancelled():
                    raise

    def drop(self, version: int) -> None:
        """Drop a version, if it is there. One that is being loaded will not be kept."""
        with self._lock:
            model = self._held.pop(version, None)
            self._loading.pop(version, None)
        del model  # not under the lock: its destructor may run code

    def versions(self) -> tuple[int, ...]:
        """Return the versions in the cache, the least recently used first."""
        with self._lock:
            return tuple(self._held)

    def _load(self, version: int, load: Callable[[], T], mine: Future[T]) -> T:
        try:
            model = load()
            # The dropped models die here and not under the lock: a destructor may run code.
            self._keep(version, model, mine)
            mine.set_result(model)
        except BaseException as error:
            self._forget(version, mine)
            if isinstance(error, Exception):
                mine.set_exception(error)
            else:
                mine.cancel()
            raise
        return model

    def _keep(self, version: int, model: T, mine: Future[T]) -> list[T]:
        """Keep a model that was not dropped meanwhile; return the models dropped for it."""
        evicted: list[T] = []
        with self._lock:
            if self._loading.get(version) is mine:
                del self._loading[version]
                while len(self._held) >= self._capacity:
                    evicted.append(self._held.popitem(last=False)[1])
                self._held[version] = model
        return evicted

    def _forget(self, version: int, mine: Future[T]) -> None:
        with self._lock:
            if self._loading.get(version) is mine:
                del self._loading[version]


class OpponentPool:
    """The pool of a run.

    It holds past versions of the model as opponents of the model in training. Versions are numbers
    from 1 that only grow: a run never uses one twice, even after evictions and restarts.

    Args:
        committer: The committer of the run's handle.
    """

    def __init__(self, committer: Committer) -> None:
        self._committer = committer
        self._store = committer.store
        self._log = committer.log
        #: Each with its device, and whether it was built.
        self._models = ModelCache[tuple[tuple[str, bool], Any]](pool_rules(self._log.run).cache)

    def __repr__(self) -> str:
        run = self._log.run
        return f"<OpponentPool {run.run_id}: {len(run.roster())} of {len(run.pool)} play>"

    def _repr_html_(self) -> str:
        return markup.safely("Opponent pool", self._html)

    def _html(self) -> str:
        run = self._log.run
        known = sorted(run.roster(), key=lambda one: -one.mu)
        rows = [(f"v{one.version:04d}", one.mu, one.sigma, one.games, one.wins) for one in known]
        heads = ("version", "mu", "sigma", "games", "wins")
        table = markup.Rows(heads, rows, len(rows), "entries, the best first")
        return markup.describe(
            "Opponent pool", run.run_id, {"left": len(run.pool) - len(known)}, table
        )

    # Promotion

    def promote(
        self,
        checkpoint: Checkpoint,
        *,
        mu: float | None = None,
        sigma: float | None = None,
        frozen: bool = False,
    ) -> PoolEntry:
        """Add a model to the pool: the parts of a checkpoint for inference, without a copy of data.

        If the pool is full, the same commit evicts the oldest entry that is not frozen.

        Args:
            checkpoint: A checkpoint of this run. A frozen entry of a gate is drawn by the gate's
                name; if the checkpoint is several gates, choose one by `promote_gate`.
            mu: Estimated skill of the model. Without it the skill in the checkpoint's metrics, else
                in those of the newest checkpoint with a rating; of a frozen entry the default.
            sigma: Uncertainty of the skill, found in the same way. It is raised to at least a third
                of the default, unless the entry is frozen.
            frozen: Whether the entry stays for ever, with the rating that it has.

        Returns:
            The entry; if the same checkpoint plays in the same role already, that one, unchanged.

        Raises:
            InvalidInput: The checkpoint belongs to another run, its weights hold NaN, or a number
                is no rating.
            IncompatibleState: The checkpoint has no parts for inference.
            Conflict: The checkpoint was evicted, or the run dropped.
        """
        n = own(self._committer, checkpoint, "the pool")

        def source(run: RunManifest) -> ModelSource:
            record = run.by_n.get(n) or self._log.knowing(n).by_n[n]
            gates = [pin.name for pin in run.pins_of("gate") if pin.checkpoint == record.n]
            return ModelSource(record, gates[0] if frozen and gates else None)

        return self._promote(source, Terms(frozen, mu, sigma))

    def promote_gate(
        self, name: str, *, mu: float | None = None, sigma: float | None = None
    ) -> PoolEntry:
        """Add a gate to the pool as a frozen entry: never evicted, never rated again.

        Args:
            name: The gate; the entry is drawn by this name.
            mu: Estimated skill, which never changes; from the gate's metrics or the default without
                it.
            sigma: Uncertainty of the skill, found in the same way.

        Raises:
            NotFound: The gate is not set.
            InvalidInput: A number is no rating.
            IncompatibleState: The gate has no parts for inference.
        """

        def source(run: RunManifest) -> ModelSource:
            n = find_pin(run, "gate", name).checkpoint
            assert n is not None  # replay makes sure that every gate names one
            return ModelSource(run.by_n.get(n) or self._log.knowing(n).by_n[n], name)

        return self._promote(source, Terms(frozen=True, mu=mu, sigma=sigma))

    def _promote(self, source: Callable[[RunManifest], ModelSource], terms: Terms) -> PoolEntry:
        promotion = PromotionCommit(self._committer.writer, source, terms)
        self._log.refresh()
        self._committer.commit(promotion)
        return self._entry(self._known(promotion.version))

    # Entries

    def roster(self) -> list[PoolEntry]:
        """Return the entries that play, frozen ones included, as of now, oldest first."""
        return [self._entry(record) for record in self._log.refresh().roster()]

    def entries(self) -> list[PoolEntry]:
        """Return all entries as of now, evicted ones included, oldest first."""
        self._log.refresh()
        return [self._entry(record) for record in self._log.history().pool]

    def entry(self, version: int) -> PoolEntry:
        """Return an entry that plays.

        Raises:
            NotFound: There never was one of this version, or it left the pool; the message says
                why.
            InvalidInput: It is not a version.
        """
        number = check_version(version)
        self._log.refresh()
        return self._entry(require_playing(self._log.knowing_entry(number), number))

    def history(self, version: int) -> list[PoolEvent]:
        """Return the changes of an entry, oldest first: every rating, also of an evicted entry.

        Raises:
            NotFound: There never was one of this version.
            InvalidInput: It is not a version.
        """
        number = check_version(version)
        self._log.refresh()
        self._known(number)
        return self.histories()[number]

    def histories(self) -> dict[int, list[PoolEvent]]:
        """Return the changes of every entry by version, oldest first; the log is read once."""
        found: dict[int, list[PoolEvent]] = {}
        for event in self._events():
            found.setdefault(event.version, []).append(event)
        return found

    def evictions(self) -> list[PoolEvent]:
        """Return the evictions in order, each with its last rating and the reason."""
        return [event for event in self._events() if event.event == "evicted"]

    def _known(self, version: int) -> PoolRecord:
        return require_record(self._log.knowing_entry(version), version)

    def _events(self) -> Iterable[PoolEvent]:
        return pool_events(self._log.commits())

    # Playing

    def record_match(
        self, versions: Sequence[int | None], ranks: Sequence[float], *, match: str | None = None
    ) -> list[PoolEntry]:
        """Record a match: OpenSkill's PlackettLuce rates the entries that took part.

        Each entry has played one more game, and has won it if it came first alone; a tie for the
        first rank is no win. Frozen entries count their games and keep their rating. An entry that
        left the pool during its match is rated too.

        Args:
            versions: The version in each seat; `None` is the model in training, which plays with
                its newest rating and is not rated here. A version with several seats plays once,
                with the mean of their ranks.
            ranks: The rank of each seat, in the same order. Lower is better, equal is a tie.
            match: Identity of the match: to record one of the newest 256 again changes nothing.
                Random without it.

        Returns:
            The entries, in the order in which `versions` names them first.

        Raises:
            InvalidInput: Versions and ranks do not fit each other, or are of fewer than two
                players.
            NotFound: The pool never had one of the versions.
            Conflict: The run was dropped.
        """
        played, name = check_ranks(versions, ranks), check_match(match)
        players = [player for player in played if player is not None]

        def compose(run: RunManifest) -> Sequence[Action] | None:
            return None if name in run.matches else [rating_match(run, played, name)]

        self._log.refresh()
        self._committer.commit(compose)
        return [self._entry(self._known(player)) for player in players]

    def draw(self, game: int, *, phase: int | str | None = None) -> Matchup:
        """Return the opponent of a game: the same one for the same seed, game and pool.

        Args:
            game: Number of the game within the phase, from 0.
            phase: The phase of the game; the pool's own phase without it.

        Raises:
            InvalidInput: The run's preset declares no opponents, or there is no such phase.
        """
        (matchup,) = self.draws(game, 1, phase=phase)
        return matchup

    def draws(self, start: int, count: int, *, phase: int | str | None = None) -> list[Matchup]:
        """Return the opponents of `count` games from number `start` on, each one as `draw` does.

        The pool is the one that this handle has read last: it changes by promotions here, by
        `roster` and by `Run.refresh`, never by itself between two games. Every entry that is not
        frozen can be drawn, and the newest frozen entry of each gate that the preset names.

        Raises:
            InvalidInput: The run's preset declares no opponents, or there is no such phase.
        """
        from holdfast.registry.curation.pool.selection import Draws

        run = self._log.run
        rules = pool_rules(run)
        if not rules.draws:
            raise InvalidInput(
                "the run's preset declares no opponents to draw",
                where=run.run_id,
                expected="draws in the preset's [pool]",
            )
        playing, name = run.roster(), rules.phase if phase is None else check_phase(phase)
        check_phase_is_declared(run.spec, name)
        table = Draws(
            run.seed,
            phase_number(run.spec, name),
            rules.seed_child,
            rules.draws,
            [entry.version for entry in playing if not entry.frozen],
            {entry.gate: entry.version for entry in playing if entry.frozen and entry.gate},
        )
        return table.matchups(start, count)

    def evaluation(self, game: int) -> Matchup:
        """Return the entry that an evaluation game is for: often one with an uncertain rating.

        The share of an entry is proportional to its sigma; frozen ones are left out. The same seed,
        game and ratings, as this handle has read them last, give the same entry.

        Raises:
            NotFound: No entry plays but frozen ones.
            InvalidInput: It is not the number of a game.
        """
        from holdfast.registry.curation.pool.selection import Draws

        run = self._log.run
        rules = pool_rules(run)
        sigmas = {one.version: one.sigma for one in run.roster() if not one.frozen}
        if not sigmas:
            raise NotFound("the pool has no entry to evaluate", where=run.run_id)
        phase = phase_number(run.spec, rules.phase) if run.spec.pool else 0
        return Draws(run.seed, phase, rules.seed_child).evaluation(game, sigmas)

    def load(
        self,
        version: int,
        *,
        build: Callable[[Any], Any] | None = None,
        map_location: object = "cpu",
    ) -> Any:
        """Return the model of an entry; the most recently used ones are kept in memory.

        The preset gives their number. All callers for a version share the result: play with it, but
        do not change it. A model that left the pool may still be returned from memory.

        Args:
            version: The version.
            build: Makes the wanted object from the loaded state, once for each loaded version: give
                the same one every time.
            map_location: Device for the tensors, as `torch.device` or its name.

        Returns:
            The result of `build`; without it the state.

        Raises:
            NotFound: There never was such an entry, or it left the pool.
            InvalidInput: It is not a version.
            IntegrityError: An object of it is damaged or gone; nothing is kept in memory then.
        """
        number = check_version(version)
        wanted = (str(map_location), build is not None)

        def load() -> tuple[tuple[str, bool], Any]:
            state = self.entry(number).load(map_location=map_location)
            return wanted, state if build is None else build(state)

        while (held := self._models.get(number, load))[0] != wanted:
            self._models.drop(number)
        return held[1]

    def _entry(self, record: PoolRecord) -> PoolEntry:
        return PoolEntry(self._store, self._log, record)
