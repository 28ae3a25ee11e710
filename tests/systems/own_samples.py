"""Programs that do what the documents of ADR-004 and Thalia describe, written for these tests.

`test_documents.py` runs them everywhere, and the code of the documents themselves where those are.
"""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import torch
import yaml

KEYS = ("version", "model_state_dict", "config")


class CheckpointManager:
    """Keeps three epochs, each milestone and each release in folders below one.

    Args:
        root: The folder.
    """

    def __init__(self, root: Path) -> None:
        self._training, self._milestones, self._production, self._cards = (
            Path(root, name)
            for name in ("training", "milestones", "production", "metadata/model_cards")
        )
        for folder in (self._training, self._milestones, self._production, self._cards):
            folder.mkdir(parents=True, exist_ok=True)

    def save_training_checkpoint(
        self,
        model: Any,
        optimizer: Any,
        scheduler: Any,
        epoch: int,
        global_step: int,
        metrics: dict[str, float],
        config: dict[str, Any],
    ) -> Path:
        """Save an epoch, point `latest.pt` to it, and remove those before the last three."""
        path = self._training / f"epoch_{epoch:04d}_step_{global_step:08d}.pt"
        state = self._state(model, optimizer, scheduler, epoch, metrics, config)
        state |= {"global_step": global_step, "git_commit": self._get_git_commit()}
        staged = path.with_name(f"{path.name}.tmp")
        torch.save(state, staged)
        staged.rename(path)
        self._point(self._training, path)
        for old in sorted(self._training.glob("epoch_*.pt"))[:-3]:
            old.unlink()
        return path

    def save_milestone_checkpoint(
        self,
        model: Any,
        optimizer: Any,
        scheduler: Any,
        epoch: int,
        metrics: dict[str, float],
        config: dict[str, Any],
        kind: str = "epoch",
    ) -> Path:
        """Save an epoch that is kept for ever, under what it is the best of."""
        metric = kind.removeprefix("best_")
        name = f"{kind}_{metrics[metric]:.4f}_epoch" if metric in metrics else "epoch"
        path = self._milestones / f"{name}_{epoch:04d}.pt"
        torch.save(self._state(model, optimizer, scheduler, epoch, metrics, config), path)
        return path

    def export_production_checkpoint(
        self,
        model: Any,
        config: dict[str, Any],
        metrics: dict[str, float],
        version: str,
        card: dict[str, Any],
    ) -> Path:
        """Write what inference needs, and the card beside it."""
        path = self._production / f"bayesian_transformer_v{version}.pt"
        state = {"version": version, "model_state_dict": model.state_dict(), "config": config}
        torch.save({**state, "metrics": metrics, "model_card": card}, path)
        (self._cards / f"v{version}.yaml").write_text(yaml.safe_dump(card))
        self._point(self._production, path)
        return path

    def load_checkpoint(self, path: Path) -> dict[str, Any]:
        """Load a file, and refuse one that lacks what all of them have."""
        found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=False)
        if lacking := [key for key in KEYS if key not in found]:
            raise ValueError(f"{path} has no {', '.join(lacking)}")
        return found

    def _state(
        self,
        model: Any,
        optimizer: Any,
        scheduler: Any,
        epoch: int,
        metrics: dict[str, float],
        config: dict[str, Any],
    ) -> dict[str, Any]:
        return {
            "version": "1.0.0",
            "timestamp": f"2025-10-25T12:00:{epoch:02d}",
            "model_state_dict": model.state_dict(),
            "optimizer_state_dict": optimizer.state_dict(),
            "scheduler_state_dict": scheduler.state_dict(),
            "epoch": epoch,
            "metrics": metrics,
            "config": config,
            "metadata": self._get_metadata(),
        }

    def _point(self, folder: Path, path: Path) -> None:
        link = folder / "latest.pt"
        link.unlink(missing_ok=True)
        link.symlink_to(path.name)

    def _get_git_commit(self) -> str | None:
        return None

    def _get_metadata(self) -> dict[str, Any]:
        return {"pytorch_version": torch.__version__, "hostname": platform.node(), "device": "CPU"}


#: Each block is a program by itself, with the names that `test_documents.py` gives to it.
BRAINS = [
    """
for name, level in (("archive.thalia.zst", 19), ("training_checkpoint.thalia.lz4", 1)):
    BrainCheckpoint.save(
        brain, name, compression=name[-3:].replace("zst", "zstd"), compression_level=level
    )
    state = BrainCheckpoint.load(name)
""",
    """
from thalia.io import PRECISION_POLICIES, PrecisionPolicy
BrainCheckpoint.save(brain, "efficient.thalia", precision_policy="fp16")
BrainCheckpoint.save(
    brain, "efficient.thalia.zst", precision_policy=PRECISION_POLICIES["fp16"], compression="zstd"
)
state = BrainCheckpoint.load("efficient.thalia")
rules = PrecisionPolicy(weights='fp16', membrane='fp32', conductances='fp16')
BrainCheckpoint.save(brain, "custom.thalia", precision_policy=rules)
""",
    """
from thalia.io import PrecisionPolicy
rules = PrecisionPolicy(default="fp32", patterns={"weights/*": "fp16", "membrane": "fp32"})
BrainCheckpoint.save(brain, "checkpoint.thalia", precision_policy=rules)
brain = BrainCheckpoint.load("checkpoint.thalia")
""",
    """
BrainCheckpoint.save(brain, "checkpoints/stage0.thalia")
base = "checkpoints/stage0.thalia"
for stage, name in (
    (1, "checkpoints/stage1.delta.thalia"),
    (2, "checkpoints/stage3.delta.thalia.zst"),
):
    train_stage(brain, stage)
    narrow = {"precision_policy": "fp16", "compression": "zstd"} if name.endswith("zst") else {}
    BrainCheckpoint.save_delta(brain, name, base_checkpoint=base, threshold=1e-6, **narrow)
    base = name
brain = BrainCheckpoint.load(base)
""",
    """
told = BrainCheckpoint.info("checkpoints/stage2.thalia")
grown = told["metadata"]["growth_history"]
print("Neurons:", told["total_neurons"])
print("Training steps:", told["training_steps"])
print("Growth events:", len(grown))
for one in grown:
    print(f"  Step {one['step']}: {one['region']} +{one['neurons_added']}")
""",
    """
brain = BrainCheckpoint.load(
    "checkpoints/large_brain.thalia", regions=['cortex_l4', 'striatum'], lazy=True
)
""",
]
