"""What the nights of a team with very many runs ask of its store, and for how long.

Real code, each request counted. Small registries of several sizes, upgraded and sealed, live
through nights: after some of the runs have saved and pruned, garbage is collected, a mirror is
brought up to date and the structure is verified, each in a process of its own. The requests and the
processor time of a job are split by least squares into four parts: the job itself, each run that is
there, each that was active, and each commit that there ever was. Together they say what a night
takes in a registry that no test machine can build. In one night of thirty `gc`
reads everything, and `verify` reads a thirtieth each night; the jobs with `all` read everything.

States are small here, since bytes are no part of this: `scripts/cost.py` knows what they cost.

    python nights.py [--runs N ...] [--saves S ...] [--team-runs N] [--team-commits N]
                     [--team-active N] [--dir FOLDER]
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import holdfast
from holdfast.backends import Backend, ObjectInfo, parse
from holdfast.backends.local.backend import LocalBackend
from holdfast.backends.wrappers import Call, Metered, Wrapper
from holdfast.registry.face.factory import open_on
from holdfast.registry.store.heads import open_heads

_KEPT = 3
_PAGE = 1000
#: A bucket's answer, and the requests that a job has under way.
_LATENCY_S, _AT_ONCE = 0.02, 16
_BILLED_AS_PUT = ("put", "put_if_absent", "list")
_MIRROR_GC = "gc of the mirror"
_EACH_NIGHT = ("gc", "sync", _MIRROR_GC, "verify")
_JOBS = (*_EACH_NIGHT, "gc, all", "verify, all")


@dataclass(frozen=True)
class Size:
    """How much there is when a night begins."""

    runs: int
    active: int
    commits: int


@dataclass(frozen=True)
class Taken:
    """What a job took."""

    puts: float  # PUT and LIST; a listing counts once for each thousand keys
    gets: float  # GET and HEAD; deletions cost nothing
    cpu_s: float

    @property
    def hours(self) -> float:
        """Hours beside a bucket: waiting for its answers, and the work of one core."""
        return ((self.puts + self.gets) * _LATENCY_S / _AT_ONCE + self.cpu_s) / 3600

    @property
    def dollars(self) -> float:
        """Price of the requests in S3's standard class."""
        return self.puts * 5e-6 + self.gets * 4e-7


class Paged(Wrapper):
    """A store that counts what a bucket bills: each thousand keys of a listing."""

    def __init__(self, store: Backend, calls: list[Call]) -> None:
        super().__init__(Metered(store, calls))
        self._calls = calls

    def list(self, *given: Any, **options: Any) -> Iterator[ObjectInfo]:
        for number, info in enumerate(super().list(*given, **options)):
            if number and number % _PAGE == 0:
                self._calls.append(Call("list", ""))
            yield info


class Team:
    """A registry of quiet runs and its mirror."""

    def __init__(self, folder: Path, runs: int, saves: int) -> None:
        self._folder, self._step, self._commits = folder, 0, 0
        for place in ("home", "mirror"):
            holdfast.init(folder / place, skip_race_probe=True).close()
        training = self._open("home")
        self._runs = [training.create_run(f"run{one:06d}", seed=one) for one in range(runs)]
        for run in self._runs:
            self._train(run, saves)
        training.upgrade()
        self._sync([])
        with self._open("mirror") as mirror:
            mirror.upgrade()
        for _ in range(3):  # runs are sealed when they are quiet, and looked at as such afterwards
            for job in _EACH_NIGHT:
                self._time(job)

    def live(self, active: int) -> tuple[Size, dict[str, Taken]]:
        """Let some runs save and prune, and return what the jobs of the night took."""
        for run in self._runs[:active]:
            self._train(run, 2)
        size = Size(len(self._runs), active, self._commits)
        return size, {job: self._time(job) for job in _JOBS}

    def _train(self, run: holdfast.Run, saves: int) -> None:
        for _ in range(saves):
            self._step += 1
            run.save({"model": {"w": np.full(64, self._step, np.int64)}}, step=self._step)
        run.retention.prune(holdfast.Retention(last=_KEPT))
        self._commits += saves + 1

    def _open(self, place: str, calls: list[Call] | None = None) -> holdfast.Registry:
        backend = Paged(LocalBackend(self._folder / place), [] if calls is None else calls)
        return open_on(backend, heads=open_heads(parse(f"s3://{self._folder.name}/{place}")))

    def _sync(self, calls: list[Call]) -> None:
        with self._open("home", calls) as reg, self._open("mirror", calls) as mirror:
            holdfast.sync(reg, mirror)

    def _time(self, job: str) -> Taken:
        calls: list[Call] = []
        begun = time.process_time()
        if job == "sync":
            self._sync(calls)
        else:
            with self._open("mirror" if job == _MIRROR_GC else "home", calls) as reg:
                if "gc" in job:
                    reg.gc(grace_s=0, full=job.endswith("all"))
                elif not reg.verify(since_last=not job.endswith("all")).ok:
                    raise SystemExit("the registry is damaged")
        cpu_s = time.process_time() - begun
        asked = Counter(call.method for call in calls)
        puts = sum(asked.pop(method, 0) for method in _BILLED_AS_PUT)
        gets = sum(asked[method] for method in ("get", "stat"))
        return Taken(puts, gets, cpu_s)


def fitted(nights: Sequence[tuple[Size, Taken]]) -> list[Taken]:
    """Return what a job takes by itself, for each run, each active one, and each commit."""
    rows = np.array([[1, size.runs, size.active, size.commits] for size, _ in nights], float)
    taken = np.array([[one.puts, one.gets, one.cpu_s] for _, one in nights])
    found, *_ = np.linalg.lstsq(rows, taken, rcond=None)
    # A hundredth of a request is less than the nights differ by chance.
    return [Taken(round(puts, 2), round(gets, 2), cpu_s) for puts, gets, cpu_s in found.tolist()]


def at(parts: Sequence[Taken], size: Size) -> Taken:
    """Return what a job takes at a size."""
    counts = (1, size.runs, size.active, size.commits)

    def total(of: Callable[[Taken], float]) -> float:
        return sum(count * of(part) for count, part in zip(counts, parts, strict=True))

    return Taken(
        total(lambda one: one.puts), total(lambda one: one.gets), total(lambda one: one.cpu_s)
    )


def report(nights: Sequence[tuple[Size, dict[str, Taken]]], team: Size, console: Console) -> None:
    """Print what was fitted, how well it fits, and what it says of the team."""
    parts = _table(
        "PUT and LIST + GET and HEAD, and ms of a processor",
        "a night, each run, each active run, each commit, off by",
    )
    whole = _table(
        f"a night with {team.runs:,} runs, {team.commits:,} commits, {team.active:,} active runs",
        "PUT and LIST, GET and HEAD, dollars, minutes of CPU, hours",
    )
    for job in _JOBS:
        found = [(size, taken[job]) for size, taken in nights]
        made = fitted(found)
        off = max(abs(at(made, size).gets - one.gets) for size, one in found)
        cells = [f"{one.puts:.2f} + {one.gets:.2f}, {1e3 * one.cpu_s:.2f}" for one in made]
        parts.add_row(job, *cells, f"{off:.0f} GET at most")
        one = at(made, team)
        counts = f"{one.puts:,.0f}", f"{one.gets:,.0f}", f"{one.dollars:.2f}"
        whole.add_row(job, *counts, f"{one.cpu_s / 60:.0f}", f"{one.hours:.2f}")
    console.print(parts)
    console.print(whole)


def _table(title: str, columns: str) -> Table:
    table = Table(title=title)
    table.add_column("job")
    for column in columns.split(", "):
        table.add_column(column, justify="right")
    return table


def main() -> None:
    """Let teams of several sizes live, and say what a large one needs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, nargs="*", default=[40, 160])
    parser.add_argument("--saves", type=int, nargs="*", default=[4, 16])
    parser.add_argument("--team-runs", type=int, default=60_000)
    parser.add_argument("--team-commits", type=int, default=12_000_000)
    parser.add_argument("--team-active", type=int, default=400)
    parser.add_argument("--dir", type=Path)
    options = parser.parse_args()
    nights = []
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        os.environ["XDG_STATE_HOME"] = folder
        for runs, saves in product(options.runs, options.saves):
            team = Team(Path(folder) / f"{runs}-{saves}", runs, saves)
            nights += [team.live(active) for active in (0, runs // 20, 0, runs // 5)]
    size = Size(options.team_runs, options.team_active, options.team_commits)
    report(nights, size, Console(width=140))


if __name__ == "__main__":
    main()
