"""The task that the programs of this example share: classify handwritten digits.

Owns the data, the network and the score. Knows nothing of checkpoints.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

_VALIDATION = 300
_TEST = 300


@dataclass(frozen=True, slots=True)
class Split:
    """Part of the data.

    Attributes:
        images: float32, [n, 1, 8, 8], 0 to 1.
        labels: int64, [n], 0 to 9.
    """

    images: Tensor
    labels: Tensor


@dataclass(frozen=True, slots=True)
class Digits:
    """The 1,797 digits that come with scikit-learn, split once and for all."""

    train: Split
    validation: Split
    test: Split


def load_data() -> Digits:
    """Return the data; nothing is downloaded."""
    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    images = torch.from_numpy(found.images[order]).float().div(16).unsqueeze(1)
    labels = torch.from_numpy(found.target[order]).long()
    sizes = [_TEST, _VALIDATION, len(order) - _TEST - _VALIDATION]
    pairs = zip(images.split(sizes), labels.split(sizes), strict=True)
    test, validation, train = (Split(*pair) for pair in pairs)
    return Digits(train, validation, test)


class Net(nn.Module):
    """Two convolutions and two dense layers; about 38,000 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Dropout(0.3), nn.Linear(512, 64), nn.ReLU()),
        )
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits, [n, 10]."""
        scores: Tensor = self.head(self.body(images))
        return scores


def make_deterministic() -> None:
    """Make equal inputs give equal bits on this machine, whatever else it is doing."""
    # Sums over several threads may be added in another order.
    torch.set_num_threads(1)
    torch.set_deterministic_debug_mode("error")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@torch.no_grad()
def score(model: nn.Module, split: Split) -> dict[str, float]:
    """Return mean cross-entropy and accuracy of a model; leave its mode as it was."""
    was_training = model.training
    model.eval()
    logits = model(split.images)
    model.train(was_training)
    hits = (logits.argmax(1) == split.labels).float().mean()
    return {
        "loss": functional.cross_entropy(logits, split.labels).item(),
        "accuracy": hits.item(),
    }
