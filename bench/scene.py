"""The states and folders that all contenders of one workload share."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from peers import forget, recall
from torch import Tensor
from workloads import WORKLOADS, State, empty_like, flatten, size_bytes, touch


@dataclass(frozen=True, slots=True)
class Scene:
    """The states and folders of one workload.

    Attributes:
        folder: On a real disk; holds nothing else.
        kept: A state that never changes; loads read it from `at_rest`.
        moving: A state that changes before every save.
        target: What loads load into.
    """

    folder: Path
    kept: State
    moving: State
    target: State

    @classmethod
    def of(cls, workload: str, scale: float, folder: Path) -> Scene:
        training = WORKLOADS[workload](scale)
        kept = training.state()
        scene = cls(folder, kept, training.next_save(), empty_like(kept))
        scene.at_rest.mkdir()
        return scene

    @property
    def size_bytes(self) -> int:
        return size_bytes(self.kept_tensors)

    @property
    def kept_tensors(self) -> dict[str, Tensor]:
        return flatten(self.kept)

    @property
    def moving_tensors(self) -> dict[str, Tensor]:
        return flatten(self.moving)

    @property
    def target_tensors(self) -> dict[str, Tensor]:
        return flatten(self.target)

    @property
    def at_rest(self) -> Path:
        """The folder that loads read, from the first round to the last."""
        return self.folder / "at_rest"

    @property
    def fresh(self) -> Path:
        """Where a save writes; empty at each."""
        return self.folder / "fresh"

    def before_save(self) -> None:
        """Change every chunk of the moving state and make an empty folder."""
        touch(self.moving_tensors)
        self.fresh.mkdir()
        os.sync()

    def after_save(self) -> None:
        """Remove what was saved, and wait until the disk is idle again."""
        shutil.rmtree(self.fresh)
        os.sync()

    def before_load(self, path: Path, *, cold: bool) -> None:
        """Spoil the target, and drop or warm the page cache of the files to be loaded."""
        touch(self.target_tensors)
        (forget if cold else recall)(path)

    def after_load(self) -> None:
        """Refuse a load that did not bring the kept state back."""
        kept, loaded = self.kept_tensors, self.target_tensors
        wrong = [path for path in kept if not torch.equal(kept[path], loaded[path])]
        if wrong:
            raise ValueError(f"not loaded: {', '.join(wrong[:8])}")
