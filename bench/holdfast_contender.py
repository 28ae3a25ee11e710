"""Holdfast as a contender: what is timed of it, by its public face alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rounds import Contender
from scene import Scene
from workloads import State

import holdfast


class Holdfast:
    """Holdfast in one scene.

    Three registries: a fresh one for each durable save; one at rest that holds the kept state, to
    load it from and to save it to unchanged; one whose history grows.
    """

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._steps = itertools.count(1)
        self._fresh: Any = None
        self._folder = scene.at_rest / "registry"
        self._at_rest, self._resting = _new_run(self._folder)
        self._growing_registry, self._growing = _new_run(scene.folder / "growing")
        self._kept = self._resting.save(scene.kept, step=next(self._steps))
        self._pending: Any = None

    @property
    def ref(self) -> str:
        """What names the kept state in the registry at rest."""
        return f"{self._resting.id}/latest"

    def contenders(self) -> list[Contender]:
        scene = self._scene
        return [
            Contender("holdfast save", self._save, self._before_save, self._after_save),
            Contender(
                "holdfast save, with history", self._save_again, scene.before_save, scene.after_save
            ),
            Contender("holdfast save, unchanged", self._save_unchanged),
            Contender(
                "holdfast save_async, blocked",
                self._save_async,
                scene.before_save,
                self._after_async,
            ),
            self._loading("holdfast load", self._load, cold=False),
            self._loading("holdfast load, cold", self._load_cold, cold=True),
        ]

    def close(self) -> None:
        self._at_rest.close()
        self._growing_registry.close()

    def _loading(self, name: str, act: Callable[[], None], *, cold: bool) -> Contender:
        before = partial(self._scene.before_load, self._folder, cold=cold)
        return Contender(name, act, before, self._scene.after_load)

    def _before_save(self) -> None:
        self._scene.before_save()
        self._fresh = _new_run(self._scene.fresh / "registry")

    def _save(self) -> None:
        self._fresh[1].save(self._scene.moving, step=1)

    def _after_save(self) -> None:
        self._fresh[0].close()
        self._scene.after_save()

    def _save_again(self) -> None:
        self._growing.save(self._scene.moving, step=next(self._steps))

    def _save_unchanged(self) -> None:
        self._resting.save(self._scene.kept, step=next(self._steps))

    def _save_async(self) -> None:
        self._pending = self._growing.save_async(self._scene.moving, step=next(self._steps))

    def _after_async(self) -> None:
        self._pending.wait()
        self._scene.after_save()

    def _load(self) -> None:
        self._at_rest.checkpoint(self.ref).load_into(self._scene.target)

    def _load_cold(self) -> None:
        load(self._folder, self.ref, self._scene.target)


class Compressed:
    """A durable save and a warm load with one compression."""

    def __init__(self, scene: Scene, compression: str) -> None:
        self._scene, self._compression = scene, compression
        self._folder = scene.at_rest / compression
        self._at_rest, run = _new_run(self._folder, compression=compression)
        self._ref = f"{run.id}/latest"
        run.save(scene.kept, step=1)
        #: Bytes of all files that the kept state takes.
        self.stored_bytes = sum(p.stat().st_size for p in self._folder.rglob("*") if p.is_file())
        self._fresh: Any = None

    def contenders(self) -> list[Contender]:
        before = partial(self._scene.before_load, self._folder, cold=False)
        how = self._compression
        return [
            Contender(f"save, {how}", self._save, self._before_save, self._after_save),
            Contender(f"load, {how}", self._load, before, self._scene.after_load),
        ]

    def close(self) -> None:
        self._at_rest.close()

    def _before_save(self) -> None:
        self._scene.before_save()
        self._fresh = _new_run(self._scene.fresh / "registry", compression=self._compression)

    def _save(self) -> None:
        self._fresh[1].save(self._scene.moving, step=1)

    def _after_save(self) -> None:
        self._fresh[0].close()
        self._scene.after_save()

    def _load(self) -> None:
        self._at_rest.checkpoint(self._ref).load_into(self._scene.target)


def load(folder: Path, ref: str, into: State) -> None:
    """Open a registry and load a checkpoint into an existing state, as a new process would."""
    reg = holdfast.open(str(folder))
    reg.checkpoint(ref).load_into(into)
    reg.close()


def _new_run(folder: Path, **options: Any) -> tuple[Any, Any]:
    reg = holdfast.init(str(folder), **options)
    return reg, reg.create_run(seed=1, config={})
