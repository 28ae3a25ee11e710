"""A trainer, followers and engines as processes that are killed, and what the engines loaded."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np

import holdfast
from holdfast.engines import EngineFollower
from holdfast.errors import IntegrityError, StorageError
from holdfast.registry.hub.engines import following
from tests.registry.hub.engines import fakes
from tests.support.processes import start_process

_TENSORS, _ROWS = 4, 64
_SHARD_BYTES = 40_000  # two tensors in each of two files


def weights(step: int) -> dict[str, np.ndarray]:
    """Return the weights of a step: of each tensor some rows change."""
    found = {}
    for number in range(_TENSORS):
        made = np.random.default_rng(number).random((_ROWS, 64), np.float32)
        made[step % _ROWS] = step + number
        found[f"layers.{number}.weight"] = made
    return found


def hash_at(step: int) -> str:
    return fakes.tensors_hash({name: one.tobytes() for name, one in weights(step).items()})


def train(registry: str, endpoint: str, last: int, log: str, engine: str) -> None:
    """Train on from the newest step; note when each save returned, and give an engine some time."""
    os.environ["AWS_ENDPOINT_URL"] = endpoint
    with holdfast.open(registry) as reg:
        run = reg.run("llm")
        restored = run.restore()
        first = restored.checkpoint.step + 1 if restored else 1
        for step in range(first, last + 1):
            before = Path(engine).stat().st_size
            run.save({"model": weights(step)}, step=step)
            with Path(log).open("a") as file:
                file.write(json.dumps({"step": step, "at": time.time()}) + "\n")
            for _ in range(200):
                if Path(engine).stat().st_size > before:
                    break
                time.sleep(0.01)
        run.status = "completed"


def follow(registry: str, endpoint: str, into: str, kind: str, urls: list[str]) -> None:
    os.environ["AWS_ENDPOINT_URL"] = endpoint
    following._LONGEST_BACKOFF_S = 1.0
    while True:
        try:
            with holdfast.open(registry, read_only=True) as reg:
                given: Any = {"notify": kind, "urls": urls, "shard_bytes": _SHARD_BYTES}
                with EngineFollower(reg.run("llm"), into, **given, poll_s=0.05) as follower:
                    return follower.run()
        except (StorageError, IntegrityError):  # as it begins; whoever started it does so again
            time.sleep(0.1)


def serve(kind: str, port: int, log: str, model: str) -> None:
    fakes.KINDS[kind](port, log, model).serve_forever()


@dataclass(frozen=True)
class Told:
    """What the engines of a life have loaded."""

    syncs: int  # loads of a version
    versions: int  # different versions among them
    seconds: list[float]  # from a save to the first confirmation by each engine
    kills: int

    def figures(self) -> str:
        cuts = quantiles(self.seconds, n=100)
        return (
            f"{self.syncs} syncs of {self.versions} versions, {self.kills} kills: 0 wrong, "
            f"never backwards; commit to confirmation {median(self.seconds):.2f} s, "
            f"99th percentile {cuts[98]:.2f} s"
        )


class Life:
    """One training; one follower of several SGLang, and one of a vLLM.

    Args:
        root: A folder for logs and models.
        stack: Ends the processes.
        kinds: The engines.
        registry: Where the registry is made.
        endpoints: Where the trainer and where the followers find S3, if it is there.
    """

    def __init__(
        self,
        root: Path,
        stack: ExitStack,
        kinds: Sequence[str],
        registry: str,
        endpoints: tuple[str, str] = ("", ""),
    ) -> None:
        self._root, self._stack = root, stack
        self._registry, self._endpoints = registry, endpoints
        with holdfast.init(self._registry, skip_race_probe=True) as reg:
            reg.create_run("llm")
        self._log = root / "train.log"
        self._log.touch()
        self._engines = [(kind, free_port()) for kind in kinds]
        self._processes: dict[str, ForkServerProcess] = {}
        self._kills = 0

    def live(self, last: int, kills: int, seed: int = 0) -> Told:
        """Train to a step, with kills of everybody meanwhile, until every engine has the last."""
        chance = random.Random(seed)
        acts = self._acts(last)
        for name in acts:
            self._start(name, acts[name])
        marks = sorted(chance.sample(range(1, last // 2 + 1), kills))
        victims = [list(acts)[number % len(acts)] for number in range(kills)]
        chance.shuffle(victims)
        others = [name for name in acts if "engine" not in name]
        while any(self._processes[name].is_alive() for name in others):
            if marks and self._loaded() >= marks[0]:
                marks.pop(0)
                self._kill(victims.pop())
            for name, process in list(self._processes.items()):
                if process.exitcode:
                    assert process.exitcode == -signal.SIGKILL, name
                    self._start(name, acts[name])
            time.sleep(0.01)
        assert not marks
        return self._told(last)

    def _acts(self, last: int) -> dict[str, tuple[Any, ...]]:
        """Return the calls that the processes make."""
        acts: dict[str, tuple[Any, ...]] = {
            "trainer": (
                *(train, self._registry, self._endpoints[0], last),
                *(str(self._log), str(self._log_of(0))),
            )
        }
        for number, (kind, port) in enumerate(self._engines):
            self._log_of(number).touch()
            current = str(self._root / f"models-{kind}" / "current")
            acts[f"engine{number}"] = (serve, kind, port, str(self._log_of(number)), current)
        for kind in dict.fromkeys(kind for kind, _ in self._engines):
            urls = [f"http://127.0.0.1:{port}" for of, port in self._engines if of == kind]
            into = str(self._root / f"models-{kind}")
            about = (self._registry, self._endpoints[1], into, kind, urls)
            acts[f"follower-{kind}"] = (follow, *about)
        return acts

    def _start(self, name: str, act: tuple[Any, ...]) -> None:
        process = start_process(*act)
        self._stack.callback(process.join)
        self._stack.callback(process.kill)
        self._processes[name] = process

    def _kill(self, name: str) -> None:
        if self._processes[name].is_alive():
            self._processes[name].kill()
            self._processes[name].join()
            self._kills += 1

    def _log_of(self, number: int) -> Path:
        return self._root / f"engine{number}.log"

    def _loaded(self) -> int:
        """Return the number of versions that the first engine was told of."""
        return len(self._log_of(0).read_text().splitlines())

    def _told(self, last: int) -> Told:
        """Check what every engine has loaded, and in which order."""
        with holdfast.open(self._registry, read_only=True) as reg:
            found = reg.run("llm").checkpoints()
        order = {one.digest.hex(): (one.handle.n, one.step) for one in found}
        saved: dict[int, float] = {}
        for line in self._log.read_text().splitlines():
            saved.setdefault(json.loads(line)["step"], json.loads(line)["at"])
        syncs, seconds, versions = 0, [], set[int]()
        for number in range(len(self._engines)):
            before, seen = -1, set[int]()
            for line in self._log_of(number).read_text().splitlines():
                told = json.loads(line)
                n, step = order[told["version"]]
                assert told["hash"] == hash_at(step), f"engine {number} has no version {step}"
                assert n >= before, f"engine {number} went backwards to {step}"
                before = n
                if step not in seen and step in saved:
                    seconds.append(told["at"] - saved[step])
                seen.add(step)
                syncs += 1
            assert last in seen, f"engine {number} has not the last version"
            versions |= seen
        return Told(syncs, len(versions), seconds, self._kills)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
