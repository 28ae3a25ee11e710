"""A small Hydra: real networks, an optimizer with exact moments, schedule and generators.

It trains on noise; what counts is that every number depends on all that came before it, so that a
resume that loses a bit ends elsewhere.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

PRESET = "hydra"

#: Master seed; its lower 32 bits end the run's id.
SEED = 0x5EED_A1B2_C3D4
CHANNELS, TILES, PLANES, ACTIONS = 32, 9, 8, 46
#: Which child of a phase's seed sequence is for what.
MODEL_INIT, DATA, AUGMENTATION, ENGINE, OPPONENTS = range(5)


class Block(nn.Module):
    """A residual block with squeeze and excitation."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv1d(CHANNELS, CHANNELS, 3, padding=1, bias=False) for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.GroupNorm(4, CHANNELS) for _ in range(2))
        self.squeeze = nn.Linear(CHANNELS, 8)
        self.excite = nn.Linear(8, CHANNELS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.mish(self.norms[0](self.convs[0](x)))
        y = self.norms[1](self.convs[1](y))
        gate = torch.sigmoid(self.excite(functional.mish(self.squeeze(y.mean(-1)))))
        return functional.mish(x + y * gate.unsqueeze(-1))


class Student(nn.Module):
    """Trunk and heads; bf16, as it is trained and as it is saved."""

    def __init__(self, planes: int = PLANES) -> None:
        super().__init__()
        self.stem = nn.Conv1d(planes, CHANNELS, 3, padding=1)
        self.blocks = nn.Sequential(*(Block() for _ in range(2)))
        flat = CHANNELS * TILES
        self.policy_head = nn.Linear(flat, ACTIONS)
        self.value_head = nn.Linear(flat, 1)
        self.grp_head = nn.Linear(flat, 24)
        self.tenpai_head = nn.Linear(flat, 3)
        self.danger_head = nn.Linear(flat, 9)
        self.to(torch.bfloat16)

    def trunk(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(self.stem(x)).flatten(1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = self.trunk(x)
        others = (self.grp_head, self.tenpai_head, self.danger_head)
        aux = sum(head(features).square().mean() for head in others)
        return self.policy_head(features), self.value_head(features).square().mean() + aux


class AdamW32(torch.optim.Optimizer):
    """AdamW for bf16 weights with moments in fp32.

    The load of torch's own base class casts the moments to the weights' dtype, and so destroys what
    the document forbids to lose; this one takes them as they are.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "weight_decay": 0.01})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)

    def _update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[param], group["betas"]
        if not state:
            zeros = torch.zeros_like(param, dtype=torch.float32)
            state.update(step=0, exp_avg=zeros, exp_avg_sq=zeros.clone())
        grad, weights = param.grad.float(), param.float()
        state["step"] += 1
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        mean = state["exp_avg"] / (1 - beta1 ** state["step"])
        spread = (state["exp_avg_sq"] / (1 - beta2 ** state["step"])).sqrt_().add_(1e-8)
        weights.mul_(1 - group["lr"] * group["weight_decay"])
        param.copy_(weights.addcdiv_(mean, spread, value=-group["lr"]))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        params = [param for group in self.param_groups for param in group["params"]]
        self.state.clear()
        for index, kept in state_dict["state"].items():
            self.state[params[index]] = {
                key: value.clone() if isinstance(value, torch.Tensor) else value
                for key, value in kept.items()
            }


class Teacher(Student):
    """A student with a wider stem: it sees what only an oracle does, less and less of it."""

    def __init__(self) -> None:
        super().__init__(3 * PLANES)
        for mask in ("mask_opp", "mask_wall"):
            self.register_buffer(mask, torch.ones(PLANES, 1, dtype=torch.bfloat16))

    def trunk(self, x: torch.Tensor) -> torch.Tensor:
        oracle = [x.flip(-1) * self.mask_opp, x.roll(1, -1) * self.mask_wall]
        return super().trunk(torch.cat([x, *oracle], 1))

    def fade(self, share: float) -> None:
        """Take away what only the oracle sees, from all of it at 0 to nothing at 1."""
        self.mask_opp.fill_(1 - share)
        self.mask_wall.fill_(1 - share)


class Training:
    """One phase in one process. What it needs to go on as if nothing had happened is its state."""

    def __init__(self, phase: int, seeds: np.random.SeedSequence) -> None:
        self.phase = phase
        self.global_step = 0
        self.cursor = {"epoch": 0, "file": 0}
        self.metrics: dict[str, float] = {}
        self.seed(seeds)
        self.student = Student()
        self.teacher: Teacher | None = None
        self.pool: dict[str, Any] = {}
        self.fresh_optimizer()

    def seed(self, seeds: np.random.SeedSequence) -> None:
        """Seed every generator from the children of a phase's sequence."""
        children = seeds.spawn(OPPONENTS + 1)
        torch.manual_seed(int(children[MODEL_INIT].generate_state(1, np.uint64)[0] >> 1))
        random.seed(int(children[AUGMENTATION].generate_state(1, np.uint64)[0]))
        self.data = np.random.Generator(np.random.PCG64(children[DATA]))

    def fresh_optimizer(self) -> None:
        """Make a fresh AdamW with a warm-up."""
        self.optimizer = AdamW32(self.student.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=50)

    def train(self, steps: int) -> None:
        """Make one update, which counts as `steps` steps."""
        self.global_step += steps
        self.cursor = {"epoch": self.global_step // 70_000, "file": self.cursor["file"] + 1}
        planes = self.data.standard_normal((4, PLANES, TILES)).astype(np.float32)
        if random.random() < 0.5:  # augmentation
            planes = planes[:, ::-1].copy()
        batch = torch.from_numpy(planes).to(torch.bfloat16)
        loss = self._loss(functional.dropout(batch, 0.1))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()

    def _loss(self, batch: torch.Tensor) -> torch.Tensor:
        policy, rest = self.student(batch)
        chosen = torch.from_numpy(self.data.integers(0, ACTIONS, len(batch)))
        loss = functional.cross_entropy(policy.float(), chosen) + rest.float()
        if self.teacher is not None:
            with torch.no_grad():
                wanted = self.teacher(batch)[0]
            loss = loss + (policy - wanted).square().mean().float()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return everything, under the document's names."""
        state = {
            "model_record": self.student.state_dict(),
            "optimizer_record": self.optimizer.state_dict(),
            "scheduler_record": self.scheduler.state_dict(),
            "rng_state": {
                "torch": torch.get_rng_state(),
                "python": random.getstate(),
                "numpy": self.data.bit_generator.state,
                "cursor": dict(self.cursor),
            },
            "global_step": self.global_step,
            "phase": self.phase,
            "config": {"channels": CHANNELS, "lr": 1e-3, "betas": (0.9, 0.999)},
            "metrics": dict(self.metrics),
            "timestamp": int(time.time()),
            "checkpoint_version": 1,
        }
        if self.teacher is not None:
            state["teacher_state_dict"] = self.teacher.state_dict()
        if self.phase == 3:
            state["opponent_pool_metadata"] = dict(self.pool)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        self.phase = state["phase"]
        self.global_step = state["global_step"]
        self.student.load_state_dict(state["model_record"])
        self.optimizer.load_state_dict(state["optimizer_record"])
        self.scheduler.load_state_dict(state["scheduler_record"])
        torch.set_rng_state(state["rng_state"]["torch"])
        random.setstate(state["rng_state"]["python"])
        self.data.bit_generator.state = state["rng_state"]["numpy"]
        self.cursor = dict(state["rng_state"]["cursor"])
        self.metrics = dict(state["metrics"])
        if "teacher_state_dict" in state:
            self.teacher = Teacher()
            self.teacher.load_state_dict(state["teacher_state_dict"])
            self.teacher.eval().requires_grad_(False)
        self.pool = dict(state.get("opponent_pool_metadata", {}))


def seeds_of(phase: int) -> np.random.SeedSequence:
    """Return the root of a phase's seeds."""
    return np.random.SeedSequence(SEED, spawn_key=(phase,))
