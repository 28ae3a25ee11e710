"""A month of a team in fast motion, on the real code, with a clock that the simulation moves.

Writers train runs, are killed and meet a store that fails. Each night `care` brings the registry
and its mirror in order. While it works, writers save, and a second collector collects.
"""

from __future__ import annotations

import importlib
import random
import time
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast import Checkpoint, Monitor, Registry, Retention
from holdfast.backends import Backend, Body, ByteRange, ObjectInfo, parse
from holdfast.backends.errors import StoreUnavailable
from holdfast.backends.wrappers import Fault, Faulty, InjectedCrash, Wrapper
from holdfast.registry.errors import StorageError
from holdfast.registry.face import caring
from holdfast.registry.face.factory import open_on
from holdfast.registry.store.heads import open_heads
from holdfast.registry.store.store import create_config
from holdfast.registry.upkeep import data_pass, verify_notes
from holdfast.registry.upkeep.repacking import repack_plan
from tests.support.clocked import Clocked
from tests.support.inline import without_threads
from tests.support.states import same
from tests.support.stores import Scratch

DAY_S = 86_400
MODEL_BYTES, OPTIMIZER_BYTES = 32_000, 64_000
STATE_BYTES, PACKS = MODEL_BYTES + OPTIMIZER_BYTES, 2
LAST = 3
_PAGE = 1000


@dataclass(frozen=True)
class Plan:
    """How large the team is, and how often something goes wrong."""

    writers: int = 50
    runs: int = 600
    nights: int = 30
    saves_a_day: int = 4
    failing: float = 0.03  # of the saves
    dying_nights: Sequence[int] = (1, 17)  # in which `care` is killed, and started once more
    seed: int = 1

    @property
    def days(self) -> float:
        """Days that a run trains."""
        return self.writers * self.nights / self.runs

    @property
    def saves(self) -> int:
        """Saves of a run."""
        return round(self.days * self.saves_a_day)


class Billed(Wrapper):
    """A store that counts what a bucket bills: each thousand objects of a listing are a request."""

    def __init__(self, inner: Backend, bill: Counter[str]) -> None:
        super().__init__(inner)
        self._bill = bill
        self.before: Callable[[], object] = lambda: None

    def _count(self, kind: str) -> None:
        self._bill[kind] += 1
        self.before()

    def get(
        self,
        key: str,
        byte_range: ByteRange | None = None,
        *,
        into: Sequence[memoryview] | None = None,
    ) -> bytes:
        self._count("get")
        return super().get(key, byte_range, into=into)

    def stat(self, key: str) -> ObjectInfo:
        self._count("get")
        return super().stat(key)

    def put(self, key: str, body: Body) -> None:
        self._count("put")
        super().put(key, body)

    def put_if_absent(self, key: str, body: Body) -> bool:
        self._count("put")
        return super().put_if_absent(key, body)

    def list(self, *given: Any, **options: Any) -> Iterator[ObjectInfo]:
        self._count("put")
        for number, info in enumerate(super().list(*given, **options)):
            if number and number % _PAGE == 0:
                self._count("put")
            yield info


def cached_by_line(decode: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that takes each line of a slot apart once."""
    known: dict[bytes, Any] = {}

    def decoded(line: bytes, *, where: str) -> Any:
        if line not in known:
            known[line] = decode(line, where=where)
        return known[line]

    return decoded


class Sorted(Scratch):
    """A store in memory that finds the keys of a listing without looking at all others."""

    def __init__(self) -> None:
        super().__init__()
        self._keys: list[str] = []
        create_config(self, "skipped")

    def put(self, key: str, body: Body) -> None:
        self.delete(key)
        self.put_if_absent(key, body)

    def put_if_absent(self, key: str, body: Body) -> bool:
        is_ours = super().put_if_absent(key, body)
        if is_ours:
            insort(self._keys, key)
        return is_ours

    def delete(self, key: str) -> None:
        at = bisect_left(self._keys, key)
        if self._keys[at : at + 1] == [key]:
            del self._keys[at]
        super().delete(key)

    def list(self, prefix: str = "", **options: Any) -> Iterator[ObjectInfo]:
        if options.get("delimiter"):
            yield from super().list(prefix, **options)
            return
        begin = bisect_left(self._keys, prefix)
        found = self._keys[begin : bisect_left(self._keys, f"{prefix}\x7f")]
        found = found[bisect_right(found, options.get("start_after", "")) :]
        for key in found[: options.get("limit")]:
            yield self.stat(key)


def state(run: int, step: int) -> dict[str, Any]:
    """Return the state of a step: nothing of it is in another one."""
    rng = np.random.default_rng([run, step])
    model, optimizer = (rng.integers(0, 256, n, "u1") for n in (MODEL_BYTES, OPTIMIZER_BYTES))
    return {"model": {"w": model}, "optimizer": {"m": optimizer}, "step": step}


def loss(run: int, step: int) -> float:
    return float(np.random.default_rng([run, step, 7]).random())


class Writer:
    """A machine of the team: it trains one run after another, and survives what goes wrong."""

    def __init__(self, team: Team) -> None:
        self._team = team
        self._run: Any = None
        self.number = self.step = 0

    def turn(self) -> None:
        """Save once; begin a run before the first save of it, complete it after the last."""
        if self._run is None:
            if not self._team.coming:
                return
            self.number, self.step = self._team.coming.pop(0), 0
            self._open()
            self._team.bill["runs"] += 1
        self.step += 1
        while self._team.saved.get(self.number, 0) < self.step:
            try:
                self._save()
            except StorageError:
                self._team.bill["errors"] += 1
            except InjectedCrash:
                self._team.bill["deaths"] += 1
                self._begin_anew()
            else:
                self._team.saved[self.number] = self.step
        self._team.bill["saves"] += 1
        if self.step == self._team.plan.saves:
            self._faulty._faults.clear()
            self._run.status = "completed"
            self._run = None

    def _begin_anew(self) -> None:
        """Train on in another process, from the save that was acknowledged, or was about to be."""
        self._open()
        restored = self._run.restore()
        found = 0 if restored is None else restored.checkpoint.step
        assert found in (self.step - 1, self.step)
        if restored is not None:
            assert same(restored.state, state(self.number, found))

    def _open(self) -> None:
        self._faulty = Faulty(self._team.billed["writers"])
        registry = without_threads(open_on(self._faulty))
        options = {"monitor": Monitor(metric="loss", mode="min"), "seed": 1}
        self._run = registry.run(
            f"run{self.number:04}", create=True, retention=Retention(last=LAST, best=1), **options
        )

    def _save(self) -> None:
        team, faults = self._team, self._faulty._faults
        faults.clear()
        if team.chance.random() < team.plan.failing:
            at = self._faulty.calls + team.chance.randint(1, PACKS + 3)
            error = StoreUnavailable("no answer") if team.chance.random() < 0.5 else None
            after = team.chance.random() < 0.5
            faults[at] = Fault(at, after=after, error=error)
        self._run.save(
            state(self.number, self.step),
            step=self.step,
            metrics={"loss": loss(self.number, self.step)},
        )


@dataclass
class Team:
    """The team, its registry and its mirror."""

    plan: Plan
    bill: Counter[str] = field(default_factory=Counter)
    saved: dict[int, int] = field(default_factory=dict)  # the newest acknowledged step of each run

    def __post_init__(self) -> None:
        self.chance = random.Random(self.plan.seed)
        self.home, self.mirror = Clocked(Sorted()), Clocked(Sorted())
        self.requests = {one: Counter[str]() for one in ("writers", "night", "mirror")}
        self.billed = {
            one: Billed(self.mirror if one == "mirror" else self.home, bill)
            for one, bill in self.requests.items()
        }
        self.coming = list(range(self.plan.runs))
        self.crew = [Writer(self) for _ in range(self.plan.writers)]
        self.billed["night"].before = self._between
        self.byte_months = 0.0
        self._beside: list[tuple[int, Callable[[], object]]] = []
        self._asked, self._longest = 0, 200

    def live(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Live through the month, and one more night in which nobody trains."""
        clock = SimpleNamespace(time=lambda: 1e9 + self.home.ahead_s, monotonic=time.monotonic)
        for module in (caring, data_pass, verify_notes):
            monkeypatch.setattr(module, "time", clock)
        # Slots never change: what a process reads again and again is taken apart once.
        folding = importlib.import_module("holdfast.registry.history.replay.advance")
        monkeypatch.setattr(folding, "decode_line", cached_by_line(folding.decode_line))
        # A state stands for one that is much larger, and so do its packs: none of them is small.
        monkeypatch.setattr(repack_plan, "SMALL_BYTES", 16_000)
        for night in range(self.plan.nights):
            for _ in range(self.plan.saves_a_day):
                for writer in self.crew:
                    writer.turn()
                self._pass(DAY_S / self.plan.saves_a_day)
            self.night(dies=night in self.plan.dying_nights)
            self.byte_months += self.stored_bytes() / self.plan.nights
        self.asked = sum(self.requests.values(), Counter[str]())
        self._pass(DAY_S)
        self.night()  # what was evicted on the last day is a day old

    def _pass(self, seconds: float) -> None:
        self.home.ahead_s += seconds
        self.mirror.ahead_s += seconds

    def stored_bytes(self, prefix: str = "") -> int:
        """Return the bytes of the registry and of its mirror under a prefix."""
        places = self.home, self.mirror
        return sum(info.size_bytes for place in places for info in place.list(prefix))

    def night(self, *, dies: bool = False) -> None:
        """Let `care` work, with writers and a second collector at any of its requests."""
        if dies:  # the job is killed at some request, and started once more
            self._beside = [(self.chance.randint(1, 150), self._die)]
            with pytest.raises(InjectedCrash):
                self._care()
        saves = [writer.turn for writer in self.chance.choices(self.crew, k=3)]
        acts = self.chance.sample([*saves, self._collect], 4)
        moments = sorted(self.chance.sample(range(20, self._longest), 4))
        self._beside = list(zip(moments, acts, strict=True))
        before = self.requests["night"].total()
        assert self._care().ok
        self._longest = max(self._longest, (self.requests["night"].total() - before) // 2)
        with self._opened("mirror", "mirror") as there:
            assert holdfast.care(there).ok

    def _between(self) -> None:
        """Let others act at a request of `care`, where their moment has come."""
        self._asked += 1
        while self._beside and self._asked >= self._beside[0][0]:
            _, act = self._beside.pop(0)
            act()

    @staticmethod
    def _die() -> None:
        raise InjectedCrash

    def _opened(self, name: str, machine: str) -> Registry:
        heads = open_heads(parse(f"s3://team/{machine}"))
        return without_threads(open_on(self.billed[name], heads=heads))

    def _care(self) -> Any:
        self._asked = 0
        with self._opened("night", "home") as reg, self._opened("mirror", "copy") as there:
            return holdfast.care(reg, mirrors=[there])

    def _collect(self) -> None:
        with without_threads(open_on(self.billed["night"])) as reg:
            self.bill["collected"] += reg.gc().deleted.objects

    def kept(self, run: int) -> list[int]:
        """Return the steps that the policy of a run keeps: the last ones, and the best one."""
        steps = range(1, self.saved[run] + 1)
        best = min(steps, key=lambda step: loss(run, step))
        return sorted({*steps[-LAST:], best})

    def check_nothing_lost(self) -> int:
        """Check each checkpoint that the policies keep, in both places; return how many it are."""
        for place in self.home, self.mirror:
            with without_threads(open_on(place)) as reg:
                assert reg.run_names() == [f"run{one:04}" for one in sorted(self.saved)]
                for number in self.saved:
                    found: list[Checkpoint] = reg.run(f"run{number:04}").checkpoints()
                    assert [one.step for one in found] == self.kept(number)
                    for one in found:
                        assert same(one.load(), state(number, one.step))
                assert reg.verify(deep=True).ok
        return sum(len(self.kept(one)) for one in self.saved)
