"""Save and load a sharded state: `run.save`, torch's DCP into Holdfast, and DCP's own writers.

    python bench/sharded_saves.py [--workloads hydra,lm] [--ranks 2,4] [--stores folder,s3]

The state is one of `workloads.py`, split along the first axis of each tensor. All contenders take
part in each round, in another order each time, and each saves, or copies, a state in which every
chunk has changed. A time is that of the slowest rank, and the median of the rounds after the first.
`folder` is in memory where there is /dev/shm, with DCP's FileSystemWriter; `s3` is a radosgw of
this machine, with its FsspecWriter. Peers have their default options.

Sent are the bytes that a rank sends to others, extra memory is the highest of a rank's resident
memory during the operation above that before it; both are of the rank with the most.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import boto3
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from memory import begin_peak, peak
from torch.distributed.checkpoint import _async_process_executor as saving_process
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transports import radosgw
from workloads import blank, touch

import holdfast
from holdfast.dcp import HoldfastReader, HoldfastSavePlanner, HoldfastWriter
from holdfast.distributed import TorchGroup, load_into

#: Parts of the full workloads, so that all of it takes minutes, and the server of S3, which keeps
#: what is deleted for a while, has the memory.
SCALES = {"folder": {"hydra": 1.0, "lm": 0.15}, "s3": {"hydra": 0.4, "lm": 0.05}}
SAVES = 5
#: Rounds of everything but saves in the foreground, whose bytes are compared after the last one.
OTHERS = 4
BUCKET = "bench"
COPY = "a copy into kept memory"
FILES = "DCP's own writer"
PROCESS = AsyncCheckpointerType.PROCESS


@dataclass(frozen=True)
class Job:
    """What the ranks of one table do.

    Attributes:
        workload: Its name.
        scale: The part of its size.
        store: `folder` or `s3`.
        place: The folder, or the URL below which everything is put.
        rounds: How often each contender takes part.
        in_processes: Whether DCP also saves in processes of its own, in a folder.
    """

    workload: str
    scale: float
    store: str
    place: str
    rounds: int
    in_processes: bool = True


class Counting(TorchGroup):
    """Counts the bytes that this rank sends to others."""

    sent = 0

    def exchange(self, links: str, outgoing: Any, incoming: Any) -> dict[int, memoryview]:
        self.sent += sum(len(data) for rank, data in outgoing.items() if rank != self.rank)
        return super().exchange(links, outgoing, incoming)


class Peak:
    """The resident memory of this process above what it was, at its highest."""

    def __enter__(self) -> Self:
        self._before = begin_peak(trim=False)
        return self

    def __exit__(self, *_: object) -> None:
        self.extra = max(0, peak() - self._before)


@dataclass
class Figures:
    """What was measured of one operation: of each round the rank with the most.

    Attributes:
        seconds: The times.
        sent: The bytes sent to other ranks; `None` if they are not counted.
        extra: The extra memory, in bytes.
    """

    seconds: list[float] = field(default_factory=list)
    sent: float | None = None
    extra: float = 0.0


class Scene:
    """One rank: its state, its registries, and the operations by name."""

    def __init__(self, rank: int, size: int, job: Job) -> None:
        self._job, self._rank = job, rank
        self._group, self._own = Counting(), dist.new_group(backend="gloo")
        self.state = sharded(blank(job.workload, job.scale), size)
        self.parts = {name: one for name, one in locals_of(self.state) if one.numel()}
        self._kept = {name: torch.empty_like(one) for name, one in self.parts.items()}
        self._step = 0
        self._runs = {}
        for name in ("run", "dcp", "async"):
            reg = holdfast.open(f"{job.place}/{name}")
            self._runs[name] = reg.run("run", create=True, group=self._group)
        self._saved: Any = None
        self._files = ""
        self.figures: dict[str, Figures] = {}

    def round(self, turn: int) -> None:
        """Let every contender save and load once, in another order each time."""
        tables = [(self._saves(), True)]
        if turn < OTHERS:
            tables += [(self._blocked(), True), (self._loads(), False)]
        for acts, changes in tables:
            names = list(acts)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                if changes:
                    touch(self.parts)
                self._step += 1
                self._measure(name, acts[name], is_first=turn == 0)

    def _measure(self, name: str, act: Callable[[], Any], *, is_first: bool) -> None:
        self._group.sent = 0
        dist.barrier()
        with Peak() as memory:
            began = time.perf_counter()
            running = act()
            took = time.perf_counter() - began
            if running is not None:
                running()
        found = torch.tensor([took, self._group.sent, memory.extra], dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        known = self.figures.setdefault(name, Figures())
        if not is_first:
            seconds, sent, extra = found.tolist()
            known.seconds.append(seconds)
            known.sent = None if FILES in name or name == COPY else sent
            known.extra = max(known.extra, extra)

    def _saves(self) -> dict[str, Callable[[], Any]]:
        def ours() -> None:
            self._saved = self._runs["run"].save(self.state, step=self._step)

        def files() -> None:
            self._files = f"{self._job.place}/files/{self._step}"
            dcp.save(self.state, storage_writer=self._writer(self._files))

        return {
            "run.save": ours,
            "dcp.save, HoldfastWriter": lambda: self._through_dcp("dcp"),
            f"dcp.save, {FILES}": files,
        }

    def _through_dcp(self, name: str) -> None:
        writer = HoldfastWriter(self._runs[name], step=self._step)
        planner = HoldfastSavePlanner()
        dcp.save(self.state, storage_writer=writer, planner=planner, use_collectives=False)

    def _blocked(self) -> dict[str, Callable[[], Any]]:
        def ours() -> Callable[[], Any]:
            return self._runs["async"].save_async(self.state, step=self._step).wait

        def through_dcp(**kind: Any) -> Callable[[], Any]:
            writer = HoldfastWriter(self._runs["async"], step=self._step)
            return self._begun(writer, **kind)

        def files(**kind: Any) -> Callable[[], Any]:
            place = f"{self._job.place}/async/{self._step}"
            end = self._begun(self._writer(place), **kind)
            return lambda: (end(), self._remove(place))

        acts: dict[str, Callable[[], Any]] = {
            "run.save_async blocks": ours,
            "dcp.async_save blocks, HoldfastWriter": through_dcp,
            f"dcp.async_save blocks, {FILES}": files,
            COPY: self._copy,
        }
        if self._is_folder and self._job.in_processes:
            in_process: dict[str, Any] = {"async_checkpointer_type": PROCESS}
            acts["... in a process, HoldfastWriter"] = lambda: through_dcp(**in_process)
            acts[f"... in a process, {FILES}"] = lambda: files(**in_process)
        return acts

    def _begun(self, writer: Any, **kind: Any) -> Callable[[], Any]:
        future: Any = dcp.async_save(
            self.state, storage_writer=writer, process_group=self._own, **kind
        )
        return lambda: future.result()

    def _loads(self) -> dict[str, Callable[[], Any]]:
        def through_dcp(group: Any) -> None:
            dcp.load(self.state, storage_reader=HoldfastReader(self._saved, group=group))

        def files() -> None:
            dcp.load(self.state, storage_reader=self._reader(self._files))

        return {
            "load_into": lambda: load_into(self._saved, self.state, group=self._group) and None,
            "dcp.load, HoldfastReader with a group": lambda: through_dcp(self._group),
            "dcp.load, HoldfastReader": lambda: through_dcp(None),
            f"dcp.load, {FILES}": files,
        }

    def _copy(self) -> None:
        for name, one in self.parts.items():
            self._kept[name].copy_(one)

    def _writer(self, place: str) -> Any:
        return dcp.FileSystemWriter(place) if self._is_folder else FsspecWriter(place)

    def _reader(self, place: str) -> Any:
        return dcp.FileSystemReader(place) if self._is_folder else FsspecReader(place)

    @property
    def _is_folder(self) -> bool:
        return self._job.store == "folder"

    def _remove(self, place: str) -> None:
        """Make room: each save of DCP is a whole one."""
        dist.barrier()
        if self._is_folder and self._rank == 0:
            shutil.rmtree(place)

    def save_again(self) -> None:
        """Save the present state with each contender that saves in the foreground."""
        for act in self._saves().values():
            self._step += 1
            dist.barrier()
            act()
        dist.barrier()


def sharded(state: Any, size: int) -> Any:
    """Split the tensors of a state, which are filled with numbers of this rank."""
    mesh = init_device_mesh("cpu", (size,))

    def split(value: Any) -> Any:
        if isinstance(value, Mapping):
            return type(value)((key, split(one)) for key, one in value.items())
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not value.dim():
            return value
        made = distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None)
        made.to_local().uniform_()
        return made

    return split(state)


def locals_of(state: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what this rank has of each sharded tensor."""
    if isinstance(state, DTensor):
        yield path, state.to_local()
    elif isinstance(state, Mapping):
        for key, one in state.items():
            yield from locals_of(one, f"{path}/{key}")


def work(rank: int, size: int, jobs: Sequence[Job], port: int) -> None:
    """Take part in some tables as one rank; rank 0 prints them."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    os.environ["LOCAL_WORLD_SIZE"] = str(size)  # as torchrun does
    meeting = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
    for job in jobs:
        scene = Scene(rank, size, job)
        for turn in range(job.rounds):
            scene.round(turn)
        sizes = [stored(job)]
        for _ in range(2):
            scene.save_again()
            sizes.append(stored(job))
        if rank == 0:
            nbytes = sum(one.nbytes for one in scene.parts.values()) * size
            show(f"{job.workload}, {nbytes / 1e6:.0f} MB, {size} ranks, {job.store}", scene.figures)
            show_sizes(job.rounds, *sizes)
        dist.barrier()
        del scene
        if rank == 0 and job.store == "folder":
            shutil.rmtree(job.place)
    saving_process._CHECKPOINT_PROCESS = None  # it ends when nobody holds it
    dist.destroy_process_group()


def stored(job: Job) -> dict[str, int]:
    """Return the bytes of each contender that saves in the foreground."""
    return {name: _size(job, name) for name in ("run", "dcp", "files")}


def _size(job: Job, name: str) -> int:
    if job.store == "folder":
        return sum(one.stat().st_size for one in Path(job.place, name).rglob("*") if one.is_file())
    client = boto3.session.Session().client("s3")
    prefix = f"{job.place.removeprefix(f's3://{BUCKET}/')}/{name}/"
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
    return sum(one["Size"] for page in pages for one in page.get("Contents", ()))


def show_sizes(
    saves: int, after: Mapping[str, int], changed: Mapping[str, int], same: Mapping[str, int]
) -> None:
    """Print what the contenders take on the store, and what an unchanged state adds."""
    for name, title in (("run", "run.save"), ("dcp", "dcp.save, HoldfastWriter"), ("files", FILES)):
        more = (same[name] - changed[name]) / 1e6
        print(
            f"{title:40} {after[name] / 1e6:8.0f} MB after {saves} saves, "
            f"{more:.2f} MB more for an unchanged one",
            flush=True,
        )


def show(title: str, figures: Mapping[str, Figures]) -> None:
    """Print a table; each row names what it is compared with."""
    copy = statistics.median(figures[COPY].seconds)
    least = min(len(one.seconds) for one in figures.values())
    print(f"\n{title}: medians of {least} rounds or more")
    print(f"| {'':40} | {'ms':>8} | {'ratio':>7} | {'sent MB':>8} | {'extra MB':>9} |")
    for name, one in figures.items():
        middle = statistics.median(one.seconds)
        kind = name.partition(",")[0].partition(" ")[0].removeprefix("run.").removeprefix("dcp.")
        is_blocked = "blocks" in name or name.startswith("...") or name == COPY
        peer = f"dcp.{'save' if kind == 'save' else 'load'}, {FILES}"
        reference = copy if is_blocked else statistics.median(figures[peer].seconds)
        sent = "" if one.sent is None else f"{one.sent / 1e6:.1f}"
        print(
            f"| {name:40} | {middle * 1000:8.0f} | {middle / reference:7.2f} | {sent:>8} "
            f"| {one.extra / 1e6:9.0f} |"
        )
    print("ratio: to DCP's own writer; where a call blocks, to a copy into kept memory", flush=True)


@contextmanager
def server(stores: Sequence[str]) -> Iterator[None]:
    """Serve S3 if a store needs it."""
    if "s3" not in stores:
        yield
        return
    os.environ.setdefault("AWS_DEFAULT_REGION", "us-east-1")
    with radosgw() as endpoint:
        os.environ["AWS_ENDPOINT_URL"] = endpoint
        boto3.session.Session().client("s3").create_bucket(Bucket=BUCKET)
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", default="hydra,lm")
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--stores", default="folder,s3")
    parser.add_argument("--scale", type=float, help="part of each workload's full size")
    parser.add_argument("--rounds", type=int, default=SAVES, help="the first one is not counted")
    parser.add_argument("--without-processes", action="store_true", help="of `dcp.async_save`")
    options = parser.parse_args()
    stores = options.stores.split(",")
    base = "/dev/shm" if Path("/dev/shm").is_dir() else None
    port = 20000 + os.getpid() % 20000
    for size in map(int, options.ranks.split(",")):
        folder = tempfile.mkdtemp(dir=base)
        places = {"folder": folder, "s3": f"s3://{BUCKET}"}
        jobs = [
            Job(
                workload,
                options.scale or SCALES[store][workload],
                store,
                f"{places[store]}/{workload}",
                options.rounds,
                not options.without_processes,
            )
            for workload in options.workloads.split(",")
            for store in stores
        ]
        with server(stores):
            try:
                for job in jobs:
                    for name in ("run", "dcp", "async"):
                        holdfast.init(f"{job.place}/{name}").close()
                mp.spawn(work, (size, jobs, port + size), nprocs=size)
            finally:
                shutil.rmtree(folder)


if __name__ == "__main__":
    main()
