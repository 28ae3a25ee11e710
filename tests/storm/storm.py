"""The storm itself: it starts the processes, kills and pauses them, and hears what they say."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from holdfast.backends import Backend, open_backend
from holdfast.registry.errors import Malformed, StorageError
from holdfast.registry.objects.keys import ObjectKey
from tests.storm.journal import Event, Tail
from tests.storm.others import work
from tests.storm.weather import DELETED, DELETED_ENDS
from tests.storm.worker import TRACE, Part
from tests.support.processes import run_apart, start_process
from tests.support.sometimes import Watch

CREW = {"pusher": 6, "collector": 2, "pruner": 1, "reader": 3}
#: How likely one of a role is the next to be killed.
_WEIGHTS = {"pusher": 1.0, "collector": 1.0, "pruner": 0.5, "reader": 0.5}
_POLL_S = 0.03
_PATIENCE_S = 300
#: Deletions that land once more at one time, and bytes of the file from which they are chosen.
_LATE = 8
_LATE_AMONG_BYTES = 400_000


@dataclass(frozen=True)
class Conditions:
    """How hard it blows.

    Attributes:
        seconds: How long, where that is enough for `least`.
        least: What is to be done at least, by what is counted.
        longest: How many times as long at most, on a machine that is slow.
        runs: Runs that are begun in that time.
        pause_s: A worker pauses so long between its turns, on average.
        delay_s: The store takes up to so long, now and then.
        kill_s: The shortest and longest pause before a process is killed, in seconds.
        stop_s: The shortest and longest time for which a process is stopped, in seconds.
        seed: Of everything that is left to chance.
    """

    seconds: float
    least: Mapping[str, int]
    longest: int = 4
    runs: int = 60
    pause_s: float = 0.02
    delay_s: float = 2.0
    kill_s: tuple[float, float] = (0.05, 0.5)
    stop_s: tuple[float, float] = (0.3, 4.0)
    seed: int = 1


@dataclass
class Log:
    """What was said and done.

    Attributes:
        events: Every acknowledgement, with the name of its process.
        counts: How often each thing was said or done.
        refusals: Refusals by what they said.
    """

    events: list[tuple[str, Event]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)

    @property
    def violations(self) -> list[str]:
        """What broke a promise."""
        broken = [(who, event) for who, event in self.events if event["did"] == "violation"]
        return [f"{who}: {event['what']}\n{event.get('trace', '')}" for who, event in broken]

    def add(self, who: str, event: Event) -> None:
        did = event["did"]
        self.counts[did] += 1
        if did == "refused":
            self.refusals[f"{event['error']}: {event['summary']}"] += 1
        elif did not in ("read", "gone", "saving"):
            self.events.append((who, event))
        if did == "saved":
            self.counts["packs reused"] += event["reused"]
            self.counts["packs looked for again"] += event["again"]
        elif did == "evicted":
            self.counts["checkpoints evicted"] += len(event["checkpoints"])
        elif did == "repacked":
            self.counts["states placed anew"] += event["placed"]
        elif did == "collected":
            self.counts["objects collected"] += event["deleted"]
            self.counts["objects spared"] += event["spared"]

    def missing(self, least: Mapping[str, int]) -> dict[str, int]:
        """Return what was done less often than it is to be."""
        return {what: self.counts[what] for what in least if self.counts[what] < least[what]}

    def done(self) -> int:
        """Return how much was acknowledged, to weigh the kills against."""
        return sum(self.counts[did] for did in ("saved", "read", "evicted", "collected"))


class _Place:
    """A process, and those that took its place after it was killed.

    Attributes:
        part: What the process does that is there now.
        tail: What it says.
        done: How much it has said.
        paused_until_s: When it goes on; `None` while it moves.
    """

    def __init__(self, part: Part) -> None:
        self.begin(part)

    def begin(self, part: Part) -> None:
        self.part = part
        self.tail = Tail(part.folder, part.journal)
        self.done = 0
        self.paused_until_s: float | None = None
        self.process = self._start()

    def _start(self) -> ForkServerProcess:
        return start_process(work, self.part)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(_PATIENCE_S)
        assert not self.process.is_alive()
        self.process.close()

    def signal(self, number: signal.Signals) -> None:
        pid = self.process.pid
        assert pid is not None
        with suppress(ProcessLookupError):
            os.kill(pid, number)


class Storm:
    """A crew at work on one registry, for a while.

    Args:
        url: The registry.
        folder: Where the journals go.
        seeds: Seeds of states by their ids.
        conditions: How hard it blows.
        watch: Notes the rare places that the processes have been at; the storm is to reach all.
    """

    def __init__(
        self,
        url: str,
        folder: Path,
        seeds: Mapping[str, int],
        conditions: Conditions,
        watch: Watch,
    ) -> None:
        self.log = Log()
        self._url = url
        self._folder = folder
        self._conditions = conditions
        self._chance = random.Random(conditions.seed)
        self._seeds = seeds
        self._watch_over = watch
        self._places: list[_Place] = []
        self._began_s = 0.0

    def blow(self) -> Log:
        """Let the crew work, and kill all of it in the end; return what was said."""
        (self._folder / TRACE).mkdir(parents=True)
        run_apart(os.getpid)  # the server of processes takes a while to start
        self._began_s = time.monotonic()
        try:
            for role, several in CREW.items():
                for number in range(several):
                    self._places.append(_Place(self._part(role, number, 0)))
            self._watch()
        finally:
            for place in self._places:
                place.kill()
        self._hear()
        return self.log

    def _part(self, role: str, number: int, life: int) -> Part:
        c = self._conditions
        return Part(
            role=role,
            number=number,
            life=life,
            url=self._url,
            folder=str(self._folder),
            began_s=self._began_s,
            seconds=c.seconds,
            runs=c.runs,
            pause_s=c.pause_s,
            delay_s=c.delay_s,
            seed=c.seed,
            seeds=self._seeds,
        )

    def _watch(self) -> None:
        kill_at = stop_at = late_at = 0.0
        with closing(open_backend(self._url)) as store:
            while self._goes_on(now := time.monotonic()):
                self._hear()
                self._look_after()
                if now > kill_at:
                    self._kill_one()
                    kill_at = now + self._chance.uniform(*self._conditions.kill_s)
                if now > stop_at:
                    self._stop_one(now)
                    stop_at = now + self._chance.uniform(0.3, 1.5)
                if now > late_at:
                    self._delete_late(store)
                    late_at = now + self._chance.uniform(0.2, 1)
                self._go_on(now)
                time.sleep(_POLL_S)

    def _goes_on(self, now: float) -> bool:
        elapsed_s, seconds = now - self._began_s, self._conditions.seconds
        if self.log.violations or elapsed_s > self._conditions.longest * seconds:
            return False
        if elapsed_s < seconds or self.log.missing(self._conditions.least):
            return True
        return bool(self._watch_over.missing)

    def _hear(self) -> None:
        for place in self._places:
            for event in place.tail.new():
                self.log.add(place.part.journal, event)
                place.done += 1

    def _look_after(self) -> None:
        """Say so when a process went by itself; start another one in its place."""
        for place in self._places:
            if not place.process.is_alive():
                told = f"ended by itself with {place.process.exitcode}"
                self.log.add(place.part.journal, {"did": "violation", "what": told})
                self._replace(place)

    # What befalls the crew

    def _kill_one(self) -> None:
        """Kill somebody, as long as the crew gets something done between the kills."""
        if self.log.counts["kills"] > 4 + self.log.done() / 2:
            return
        weights = [_WEIGHTS[place.part.role] for place in self._places]
        (place,) = self._chance.choices(self._places, weights)
        # One that has done nothing yet is mostly spared: a collection takes its time.
        if not place.done and self._chance.random() < 0.9:
            return
        self._replace(place)
        self.log.counts["kills"] += 1

    def _replace(self, place: _Place) -> None:
        place.kill()
        self._hear()
        part = place.part
        place.begin(self._part(part.role, part.number, part.life + 1))

    def _stop_one(self, now: float) -> None:
        """Let somebody stand still for a while."""
        moving = [place for place in self._places if place.paused_until_s is None]
        if len(moving) > len(self._places) - 3:
            place = self._chance.choice(moving)
            place.signal(signal.SIGSTOP)
            place.paused_until_s = now + self._chance.uniform(*self._conditions.stop_s)
            self.log.counts["stops"] += 1

    def _go_on(self, now: float) -> None:
        for place in self._places:
            if place.paused_until_s is not None and now > place.paused_until_s:
                place.signal(signal.SIGCONT)
                place.paused_until_s = None

    def _delete_late(self, store: Backend) -> None:
        """Let deletions land once more that were sent a while ago, as a network may."""
        path = self._folder / DELETED
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _LATE_AMONG_BYTES))
            lines = file.read().split(DELETED_ENDS)[1:-1]
        for line in self._chance.sample(lines, min(len(lines), _LATE)):
            with suppress(Malformed, StorageError):
                store.delete(str(ObjectKey.parse(line.decode())))
                self.log.counts["late deletions"] += 1
