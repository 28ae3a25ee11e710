"""Predict what a registry needs a month: bytes, requests and money, for your numbers and prices.

    python scripts/cost.py                                  # the table of docs/operations.md
    python scripts/cost.py --storage 20 --put 4.5           # other prices
    python scripts/cost.py --training 12 --days 7 --saves 24 --gb 1.4 --packs 24 --kept 5

Nothing is measured here. A test compares the table with the page, and another one compares the
prediction with what a team asked of its store in a simulated month.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

NIGHTS = 30
READ_ALL_IN_DAYS = 28
SNAPSHOT_SLOTS = 8  # slots from one snapshot to the next
#: Bytes of a slot with a save, of the other slots of a run, of a mark of `gc` with its notes, and
#: what a state of few tensors needs beside its data.
SLOT_BYTES, RUN_BYTES, MARK_BYTES, STATE_BYTES = 1300, 1800, 300, 1000


@dataclass(frozen=True)
class Prices:
    """Dollars; deletions cost nothing, and neither does traffic within a region."""

    storage: float = 23.0  # a TB and month
    put: float = 5.0  # a million of PUT and LIST
    get: float = 0.4  # a million of GET and HEAD


@dataclass(frozen=True)
class Work:
    """The work of a month."""

    name: str
    training: int  # runs that train at any time; one that ends is followed by the next
    days: float  # that a run trains
    saves: float  # a day, of each run that trains
    size_bytes: float  # that a save adds to the store
    packs: int  # that a save adds: one for each changed component, and for each 64 MiB of it
    kept: float  # checkpoints that the policy keeps of a run: the last ones, the best ones
    share: float = 0  # of all saves, that it keeps for good beside them
    older: int = 0  # runs of earlier months that are kept
    mirrors: int = 0  # each has a `care` of its own
    collectors: int = 1  # `gc` beside the one of `care` counts as well

    def held(self, saves: float) -> float:
        """Return the number of checkpoints that are kept of a number of saves."""
        return min(saves, self.kept + self.share * saves)


@dataclass
class Month:
    """What a month needs."""

    puts: float = 0  # PUT and LIST
    gets: float = 0  # GET and HEAD
    byte_months: float = 0
    kept_bytes: float = 0  # what the policies keep after the last night, and the logs
    end_bytes: float = 0  # and what they have evicted on the last day

    def cost(self, prices: Prices) -> float:
        """Return what a month costs."""
        requests = self.puts * prices.put + self.gets * prices.get
        return self.byte_months / 1e12 * prices.storage + requests / 1e6


@dataclass(frozen=True)
class Day:
    """A day, as the night after it finds the runs."""

    runs: float
    training: float  # of these runs
    slots: float  # new ones of all runs
    fresh: float  # new checkpoints that the policies keep
    kept: float  # all that they keep
    gone: float  # what they have evicted on this day: it stays for the grace of a day


# Requests of an operation: PUT and LIST, then GET and HEAD. docs/stores.md counts the first ones.
CREATE, COMMIT, OPEN_REGISTRY = (2, 1), (1, 1), (0, 1)
OPEN_RUN = (2, 8)  # the newest snapshot, and the slots after it, among them marks of some nights


def saving(packs: int) -> tuple[float, float]:
    """Return the requests of a save: packs, manifest, placement, slot, and a look at the head."""
    return packs + 3, 1


def saving_first(packs: int) -> tuple[float, float]:
    """Return those of a run's first save: it asks for epochs, and whether its packs are there."""
    return packs + 3 + packs + 1, 1


def collecting(day: Day, *, second: bool = False) -> tuple[float, float]:
    """Return those of a `gc`: it marks every run that no other one has marked, and reads slots."""
    marks = day.runs / 2 if second else day.runs
    return marks + 12, 4 * day.runs + 3 * day.slots + day.fresh + 5


def caring(day: Day, packs: int) -> tuple[float, float]:
    """Return those of the other steps of `care`: `prune`, `repack` and `verify`."""
    read = day.kept * packs / READ_ALL_IN_DAYS
    verify = day.runs + 8, day.runs + day.slots + day.training + 2 * day.fresh + read
    repack = day.kept * (1 + packs)  # placements, and the tables of packs
    opened = 2 * day.runs
    gets = opened * OPEN_RUN[1] + day.runs + repack + verify[1]
    return opened * OPEN_RUN[0] + verify[0], gets


def syncing(day: Day, packs: int) -> tuple[float, float]:
    """Return those of a night's `sync`, at both ends."""
    puts = 2 * day.runs + 6 * day.training + day.fresh * (2 * packs + 2)
    return puts, day.runs + 10 * day.training + day.slots + day.fresh * (2 + packs)


def day_of(work: Work, number: int, *, mirrored: bool = False) -> Day:
    """Return a day of the month, of the registry or of its mirror, where a night is one slot."""
    runs, kept, gone, born = work.older, work.older * work.kept, 0.0, 0.0
    while born < number:  # as many runs follow those that have ended
        trained = min(number - born, work.days)
        before = min(max(0.0, number - 1 - born), work.days)
        came = work.saves * (trained - before)
        now, then = work.held(work.saves * trained), work.held(work.saves * before)
        runs += work.training
        kept += work.training * now
        # A mirror gets what is kept when it is synced.
        gone += work.training * ((work.held(came) if mirrored else came) + then - now)
        born += work.days
    slots = work.training * (1 if mirrored else work.saves)
    fresh = work.training * work.held(work.saves)
    return Day(runs, work.training, slots, fresh, kept, gone)


def predict(work: Work) -> Month:
    """Return what a month of this work needs, the mirrors included."""
    month, logs = Month(), 0.0

    def add(requests: tuple[float, float], times: float = 1) -> None:
        month.puts += requests[0] * times
        month.gets += requests[1] * times

    for number in range(1, NIGHTS + 1):
        day, there = day_of(work, number), day_of(work, number, mirrored=True)
        begun = work.training / work.days
        add(saving(work.packs), work.training * work.saves - begun)
        add((1, 0), work.training * work.saves / SNAPSHOT_SLOTS)
        for one in (OPEN_REGISTRY, OPEN_RUN, CREATE, saving_first(work.packs), COMMIT):
            add(one, begun)
        add(collecting(day))
        add(collecting(day, second=True), work.collectors - 1)
        add(caring(day, work.packs))
        for one in (syncing(day, work.packs), collecting(there), caring(there, work.packs)):
            add(one, work.mirrors)
        logs += day.slots * SLOT_BYTES + begun * RUN_BYTES + day.runs * MARK_BYTES
        each = work.size_bytes + STATE_BYTES
        gone = day.gone + work.mirrors * there.gone
        month.kept_bytes = (day.kept * each + logs) * (1 + work.mirrors)
        month.end_bytes = month.kept_bytes + gone * each
        month.byte_months += month.end_bytes / NIGHTS
    return month


#: Parts in which others put a file; objects beside the chunks of a commit of icechunk: manifest,
#: snapshot, transaction log, and the repository's own.
PART_BYTES, ICECHUNK_OBJECTS = 64 * 2**20, 4


def by_others(work: Work) -> dict[str, Month]:
    """Return what other ways of keeping the same checkpoints need, as far as can be computed.

    Each puts the same bytes, keeps the same checkpoints, and copies what is kept to mirrors. With
    `torch.save` a program of yours lists each run in the night and deletes. icechunk expires its
    history by age, lists all objects, and reads the snapshot and manifest of each commit that
    stays; for a day nothing is deleted. Nobody may write meanwhile.
    """
    file, commits = Month(), Month()
    parts = math.ceil(work.size_bytes / PART_BYTES)
    for number in range(1, NIGHTS + 1):
        day = day_of(work, number)
        saves, copies = work.training * work.saves, day.fresh * work.mirrors
        file.puts += (saves + copies) * (parts + 2) + day.runs * (1 + work.mirrors)
        file.gets += copies * parts
        commits.puts += (saves + copies) * (parts + ICECHUNK_OBJECTS)
        commits.puts += (1 + work.mirrors) * day.kept * (parts + ICECHUNK_OBJECTS) / 1000
        commits.gets += saves * ICECHUNK_OBJECTS + copies * (parts + ICECHUNK_OBJECTS)
        commits.gets += 2 * (1 + work.mirrors) * day.kept
        file.end_bytes = day.kept * work.size_bytes * (1 + work.mirrors)
        commits.end_bytes = file.end_bytes + day.gone * work.size_bytes
        for month in (file, commits):
            month.byte_months += month.end_bytes / NIGHTS
    return {"... torch.save": file, "... icechunk": commits}


MB, GB = 1e6, 1e9
#: Cadence and number of runs are examples; sizes and policies are those of the five documents.
SYSTEMS = (
    Work("Hydra", 1, 30, 96, 168 * MB, 5, 62),
    Work("ANDREA", 1, 30, 86, 1440 * MB, 24, 100, share=0.4),
    Work("Thalia", 1, 30, 24, 2 * GB, 32, 0, share=1),
    Work("Cobre", 1, 1, 12, 14.3 * GB, 216, 3),
    Work("ADR-004", 1, 30, 24, 1440 * MB, 24, 3, share=0.2),
    Work("a team of 50", 50, 2.5, 8, 1440 * MB, 24, 4, mirrors=1),
)


def table(works: tuple[Work, ...], prices: Prices) -> str:
    """Return the table for people, with the last work as others would do it."""
    rows = ["                  saves   stored   PUT, LIST    GET, HEAD   dollars a month"]
    months = [(work, work.name, predict(work)) for work in works]
    months += [(works[-1], name, month) for name, month in by_others(works[-1]).items()]
    for work, name, month in months:
        saves = work.training * work.saves * NIGHTS
        rows.append(
            f"{name:14}{saves:9,.0f}{month.end_bytes / 1e12:6.2f} TB"
            f"{month.puts:12,.0f}{month.gets:13,.0f}{month.cost(prices):18,.2f}"
        )
    return "\n".join(rows)


def main() -> None:
    """Print the table of the systems, or the row of one's own work."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("storage", "put", "get"):
        parser.add_argument(f"--{name}", type=float, default=getattr(Prices, name))
    own = {"training": int, "days": float, "saves": float, "gb": float, "packs": int, "kept": float}
    for name, kind in {
        **own,
        "share": float,
        "older": int,
        "mirrors": int,
        "collectors": int,
    }.items():
        parser.add_argument(f"--{name}", type=kind)
    given = vars(parser.parse_args())
    prices = Prices(*(given.pop(name) for name in ("storage", "put", "get")))
    given = {name: value for name, value in given.items() if value is not None}
    if given:
        if missing := [f"--{name}" for name in own if name not in given]:
            parser.error(f"these are missing: {' '.join(missing)}")
        size_bytes = given.pop("gb") * GB
        print(table((Work("yours", size_bytes=size_bytes, **given),), prices))
    else:
        print(table(SYSTEMS, prices))


if __name__ == "__main__":
    main()
