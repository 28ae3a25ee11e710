"""What a collection costs: seconds, requests and memory, and how they grow with the registry.

Half of a registry's checkpoints are evicted; a new process collects them. Another one collects
again, by the notes of the first one, when nothing has changed. The peer is icechunk, a store of
arrays whose history is expired and collected: as many objects in all, half unneeded, in a fresh
process as well. It decides by age what may go, so that nobody may write meanwhile for
longer than that; Holdfast reads every log and placement instead. The floor below both is a bare
`find -type f` over the same folder and an unlink of as many files.

Requests are those that a bucket would get; a listing counts once for each 1,000 keys.

    python collection.py [--objects N ...] [--no-peer]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from memory import peak
from presence import is_here
from rich.console import Console
from rich.table import Table

#: A checkpoint of a small state is a pack, a manifest and a placement.
_OBJECTS_EACH = 3
#: A commit of icechunk that overwrites one chunk: snapshot, manifest, transaction log, chunk.
_PEER_OBJECTS_EACH = 4
_CHECKPOINTS_A_RUN = 100
_PEER = "icechunk"
_AGAIN = "holdfast, again"
_PAGE = 1000


def build_holdfast(folder: Path, objects: int) -> None:
    """Save, and evict half; without syncs, which a collection does not need."""
    import holdfast

    checkpoints = objects // _OBJECTS_EACH
    with holdfast.init(folder, skip_race_probe=True) as reg:
        for number in range(max(1, checkpoints // _CHECKPOINTS_A_RUN)):
            run = reg.create_run(f"run{number:05d}", seed=number)
            for step in range(_CHECKPOINTS_A_RUN):
                weights = np.full(64, number * _CHECKPOINTS_A_RUN + step, np.int64)
                run.save({"model": {"w": weights}}, step=step)
            run.retention.prune(holdfast.Retention(last=_CHECKPOINTS_A_RUN // 2))


def collect_holdfast(folder: Path) -> dict[str, Any]:
    """Collect, and return what it took."""
    from holdfast.backends.local.backend import LocalBackend
    from holdfast.backends.wrappers import Metered
    from holdfast.registry.face.factory import open_on
    from holdfast.registry.upkeep.gc import Collector

    calls: list[Any] = []
    seconds: dict[str, float] = {}
    with open_on(Metered(LocalBackend(folder), calls)) as reg:
        collector = Collector(reg.handle.store, grace_s=0)
        for step in ("choose", "condemn", "mark", "delete", "note"):
            begun = time.perf_counter()
            getattr(collector, step)()
            seconds[step] = time.perf_counter() - begun
        report = collector.report()
    requests = Counter(call.method for call in calls)
    # The backend's listing of a folder has no pages; a bucket's has.
    requests["list"] += report.objects.objects // _PAGE
    return {
        "objects": report.objects.objects,
        "deleted": report.deleted.objects,
        "seconds": sum(seconds.values()),
        "steps": seconds,
        "requests": dict(requests),
    }


def build_peer(folder: Path, objects: int) -> None:
    """Commit over and over; the first half of the history is to go."""
    import icechunk
    import zarr

    repo = icechunk.Repository.create(icechunk.local_filesystem_storage(str(folder)))
    commits = objects // _PEER_OBJECTS_EACH
    session = repo.writable_session("main")
    group = zarr.create_array(
        session.store, name="w", shape=(64,), chunks=(64,), dtype="i8", compressors=None
    )
    session.commit("begin")
    middle = ""
    for number in range(commits):
        session = repo.writable_session("main")
        zarr.open_array(session.store, path="w")[:] = np.full(64, number + 1, np.int64)
        session.commit(str(number))
        if number == commits // 2:
            time.sleep(1.1)
            middle = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())
    del group
    (folder.parent / "middle").write_text(middle)


def collect_peer(folder: Path) -> dict[str, Any]:
    """Expire and collect, and return what it took."""
    from datetime import datetime

    import icechunk

    before = _files(folder)
    middle = datetime.fromisoformat((folder.parent / "middle").read_text())
    repo = icechunk.Repository.open(icechunk.local_filesystem_storage(str(folder)))
    begun = time.perf_counter()
    repo.expire_snapshots(older_than=middle)
    repo.garbage_collect(delete_object_older_than=middle)
    seconds = time.perf_counter() - begun
    return {"objects": before, "deleted": before - _files(folder), "seconds": seconds}


def collect_floor(folder: Path) -> dict[str, Any]:
    """List every file, and unlink half of the objects."""
    begun = time.perf_counter()
    listed = [f"{place}/{name}" for place, _, names in os.walk(folder) for name in names]
    listed = [path for path in listed if "/runs/" not in path]
    for path in listed[::2]:
        os.unlink(path)  # noqa: PTH108 - a bare loop is what a floor is
    seconds = time.perf_counter() - begun
    return {"objects": len(listed), "deleted": len(listed[::2]), "seconds": seconds}


def _files(folder: Path) -> int:
    return sum(len(names) for _, _, names in os.walk(folder))


_ACTS = {
    "holdfast": (build_holdfast, collect_holdfast),
    _PEER: (build_peer, collect_peer),
    "list and unlink": (build_holdfast, collect_floor),
}


def _child(name: str, act: str, folder: Path, objects: int) -> None:
    os.fsync = lambda _: None
    build, collect = _ACTS[name]
    if act == "build":
        build(folder, objects)
        return
    told = collect(folder)
    told["peak_mib"] = peak() / 2**20
    print(json.dumps(told))


def _run(name: str, act: str, folder: Path, objects: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", name, act, str(folder), str(objects)]
    done = subprocess.run(command, check=True, capture_output=act == "collect", text=True)
    # The last line: icechunk warns on stdout.
    return json.loads(done.stdout.splitlines()[-1]) if act == "collect" else {}


def main() -> None:
    """Build, collect, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--objects", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        name, act, folder, objects = options.child
        _child(name, act, Path(folder), int(objects))
        return
    names = [name for name in _ACTS if name != _PEER or not options.no_peer]
    if _PEER in names and not is_here(_PEER, _PEER):
        names.remove(_PEER)
    table = Table("", "objects", "deleted", "seconds", "a thousand objects", "peak", "requests")
    for objects in options.objects:
        measured = {}
        for name in names:
            with tempfile.TemporaryDirectory() as place:
                folder = Path(place) / "store"
                _run(name, "build", folder, objects)
                measured[name] = _run(name, "collect", folder, objects)
                if name == "holdfast":
                    measured[_AGAIN] = _run(name, "collect", folder, objects)
        for name, told in measured.items():
            requests = told.get("requests", {})
            table.add_row(
                name,
                f"{told['objects']:,}",
                f"{told['deleted']:,}",
                f"{told['seconds']:.2f}",
                f"{told['seconds'] / told['objects'] * 1e6:.0f} ms",
                f"{told['peak_mib']:.0f} MiB",
                " ".join(f"{method} {count:,}" for method, count in sorted(requests.items())),
            )
            if "steps" in told:
                steps = " ".join(f"{step} {s:.2f}" for step, s in told["steps"].items())
                table.add_row("", "", "", steps)
        table.add_section()
        ours = measured["holdfast"]["seconds"] / measured["holdfast"]["objects"]
        for name in names[1:]:
            theirs = measured[name]["seconds"] / measured[name]["objects"]
            print(f"{objects:,} objects: holdfast / {name}, per object: {ours / theirs:.2f}")
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
