"""For how long a save in the background blocks the training, beside its peers, in one run.

Each contender is called until it returns; then, not timed, its save is awaited. A warm copy of the
state is the limit of whatever lets the training change the state at once. `dcp.async_save` runs in
a process group of one rank; Lightning's AsyncCheckpointIO takes part if it is installed.

    python bench/blocked.py --workload both --dir /var/tmp
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import shutil
import tempfile
from collections.abc import Callable, Collection
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import peers
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rich.console import Console
from rounds import Comparison, Contender, Report, print_ratios, print_times, run_rounds
from scene import Scene
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from workloads import WORKLOADS

import holdfast

COPY, OURS, LOOP = "warm copy", "holdfast save_async", "holdfast checkpointer.step"
DCP, LIGHTNING = "dcp.async_save", "Lightning AsyncCheckpointIO"
LIGHTNING_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
ROUNDS = {"hydra": 7, "lm": 3}


class Awaited:
    """Contenders whose saves are awaited after they were timed."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._step = 0
        self._finish: Callable[[], Any] = bool
        self._registry = holdfast.init(str(scene.folder / "registry"))
        self._run = self._registry.create_run("saves")
        self._looping = self._registry.create_run("loop").checkpointer(every_steps=1)
        self._checkpointer = self._looping.__enter__()
        self._writer = FileSystemWriter(scene.fresh, sync_files=True)

    def contenders(self, left_out: Collection[str] = ()) -> list[Contender]:
        copy = peers.Copy(self._scene.moving_tensors)
        found = [Contender(COPY, copy, self._scene.before_save, self._scene.after_save)]
        acts: dict[str, Callable[[], None]] = {OURS: self._ours, LOOP: self._loop, DCP: self._dcp}
        if LIGHTNING not in left_out and (lightning := _lightning()):
            self._io = lightning.AsyncCheckpointIO(lightning.TorchCheckpointIO())
            acts[LIGHTNING] = self._lightning
        for name, act in acts.items():
            found.append(Contender(name, act, self._scene.before_save, self._after))
        return found

    def close(self) -> None:
        self._looping.__exit__(None, None, None)
        self._registry.close()

    def _after(self) -> None:
        self._finish()
        self._scene.after_save()

    def _ours(self) -> None:
        self._step += 1
        self._finish = self._run.save_async(self._scene.moving, step=self._step).wait

    def _loop(self) -> None:
        self._step += 1
        saved = self._checkpointer.step(self._step, self._scene.moving)
        assert saved is not None
        self._finish = saved.wait

    def _dcp(self) -> None:
        saving = dcp.async_save(self._scene.moving, storage_writer=self._writer)
        assert isinstance(saving, Future)
        self._finish = saving.result

    def _lightning(self) -> None:
        self._io.save_checkpoint(self._scene.moving, self._scene.fresh / "lightning.ckpt")
        executor = self._io._executor
        self._finish = executor.submit(bool).result  # behind the save in the same thread


def _lightning() -> Any:
    """Return Lightning's plugins, if it is installed."""
    for name in LIGHTNING_PACKAGES:
        if importlib.util.find_spec(name.partition(".")[0]):
            return importlib.import_module(f"{name}.plugins.io")
    return None


def measure(workload: str, options: argparse.Namespace, console: Console) -> None:
    """Measure one workload in a folder of its own, and print it."""
    folder = Path(tempfile.mkdtemp(prefix="holdfast-bench-", dir=options.dir))
    try:
        scene = Scene.of(workload, options.scale, folder)
        awaited = Awaited(scene)
        contenders = awaited.contenders(options.without)
        times, cpu = run_rounds(contenders, options.rounds or ROUNDS[workload])
        awaited.close()
    finally:
        shutil.rmtree(folder)
    report = Report(workload, scene.size_bytes, times, cpu)
    names = [contender.name for contender in contenders]
    comparisons = [Comparison(OURS, (name,)) for name in names if name not in (OURS, LOOP)]
    print_times(report, console)
    print_ratios(report, [*comparisons, Comparison(LOOP, (COPY,))], console)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workload", choices=[*WORKLOADS, "both"], default="hydra")
    parser.add_argument("--rounds", type=int, help=f"default: {ROUNDS}")
    parser.add_argument("--scale", type=float, default=1.0, help="part of the full size")
    parser.add_argument("--dir", type=Path, help="on a real disk; default: the temp folder")
    parser.add_argument("--without", nargs="*", choices=[LIGHTNING], default=[], metavar="PEER")
    options = parser.parse_args()
    with tempfile.NamedTemporaryFile() as meeting:
        dist.init_process_group(
            "gloo", init_method=f"file://{meeting.name}.group", rank=0, world_size=1
        )
        for name in list(WORKLOADS) if options.workload == "both" else [options.workload]:
            measure(name, options, Console(width=120))
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
