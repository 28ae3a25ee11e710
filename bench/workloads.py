"""Training runs that the benchmarks save and load, made up but true to size and statistics.

Owns what a checkpoint of such a run looks like and how it moves from one save to the next; nothing
here measures anything. Two runs, each a model and its AdamW moments:

    hydra   SE-ResNet, 40 blocks of 256 channels: 16.7 M parameters in bf16, moments in fp32, 168 MB
    lm      GPT of 12 layers, width 768: 120 M parameters in fp32, moments in fp32, 1.44 GB

Weights start as Kaiming normal and drift as over 500 steps between saves; first moments are new at
every save (beta1 forgets); second moments are log-normal over a few decades and keep most of their
value (beta2 remembers). Every tensor owns its memory. The same seed gives the same bytes.

Run as a script to see the sizes.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

Shapes = dict[str, tuple[int, ...]]
State = dict[str, Any]

SEED = 0x486F6C64
STEPS_BETWEEN_SAVES = 500
#: Standard deviation of what one save interval adds to a weight.
WEIGHT_DRIFT = 2e-3
#: Natural logarithm of a second moment: spread within a tensor, middle and swing between tensors.
SECOND_SPREAD, SECOND_MIDDLE, SECOND_SWING = 1.15, -18.0, 3.0
#: Part of a second moment that one save interval keeps.
SECOND_KEPT = 0.9

HYDRA_DTYPE, LM_DTYPE = torch.bfloat16, torch.float32
HYDRA_HEADS = {"policy": 46, "value": 51, "tenpai": 3, "danger": 102, "grp": 24, "score": 128}


class Training:
    """A training run between two saves: the fp32 masters that no checkpoint holds.

    Args:
        shapes: The parameters, in the order of the model.
        dtype: What the model's weights are saved as.
        seed: Same seed, same run.
    """

    def __init__(self, shapes: Shapes, dtype: torch.dtype, seed: int) -> None:
        self.dtype = dtype
        self.seed = seed
        self.saves = 0
        self._parameters = [
            _Parameter(name, seed, index, *_master(shape))
            for index, (name, shape) in enumerate(shapes.items())
        ]
        self._each(_Parameter.start)

    def state(self) -> State:
        """Return what a checkpoint would hold now, in memory of its own."""
        saved = self._each(lambda parameter: parameter.saved(self.dtype, self.saves))
        names = [parameter.name for parameter in self._parameters]
        return _assembled(dict(zip(names, saved, strict=True)), self.seed, self.saves)

    def next_save(self) -> State:
        """Train for one save interval and return the state at its end."""
        self.saves += 1
        self._each(lambda parameter: parameter.drift(self.saves))
        return self.state()

    def _each(self, act: Callable[[_Parameter], Any]) -> list[Any]:
        with ThreadPoolExecutor() as pool:
            return list(pool.map(act, self._parameters))


@dataclass(frozen=True, slots=True)
class _Parameter:
    """One parameter's master weight and second moment, fp32."""

    name: str
    seed: int
    index: int
    weight: Tensor
    second: Tensor

    def start(self) -> None:
        middle = SECOND_MIDDLE + SECOND_SWING * math.sin(self.index)
        self._noise(self.second, "second", 0).mul_(SECOND_SPREAD).add_(middle).exp_()
        weight = self._noise(self.weight, "weight", 0)
        if self.name.endswith("bias"):
            weight.mul_(0.01)
        elif weight.dim() == 1:
            weight.mul_(0.05).add_(1.0)
        elif "embedding" in self.name:
            weight.mul_(0.02)
        else:
            weight.mul_(math.sqrt(2.0 * weight.shape[0] / weight.numel()))

    def drift(self, save: int) -> None:
        noise = torch.empty_like(self.weight)
        self.weight.add_(self._noise(noise, "weight", save), alpha=WEIGHT_DRIFT)
        squared = self._noise(noise, "second", save).square_()
        self.second.mul_(squared.mul_(1.0 - SECOND_KEPT).add_(SECOND_KEPT))

    def saved(self, dtype: torch.dtype, save: int) -> tuple[Tensor, dict[str, Tensor]]:
        first = self._noise(torch.empty_like(self.weight), "first", save)
        moments = {
            "step": torch.tensor(float(STEPS_BETWEEN_SAVES * (save + 1))),
            "exp_avg": first.mul_(self.second.sqrt()).mul_(0.3),
            "exp_avg_sq": self.second.clone(),
        }
        return self.weight.to(dtype, copy=True), moments

    def _noise(self, out: Tensor, role: str, save: int) -> Tensor:
        """Fill `out` with normal deviates of this parameter, role and save."""
        key = [self.seed, self.index, save, ("weight", "first", "second").index(role)]
        deviates = np.random.Generator(np.random.SFC64(np.random.SeedSequence(key)))
        deviates.standard_normal(out=out.numpy(), dtype=np.float32)
        return out


def _assembled(
    saved: Mapping[str, tuple[Tensor, dict[str, Tensor]]], seed: int, saves: int
) -> State:
    """Return the state that holds these weights and moments."""
    step = STEPS_BETWEEN_SAVES * (saves + 1)
    return {
        "model": OrderedDict((name, weight) for name, (weight, _) in saved.items()),
        "optimizer": _optimizer([moments for _, moments in saved.values()], step),
        "scheduler": {"last_epoch": step, "base_lrs": [3e-4], "_last_lr": [3e-4]},
        "rng_state": _rng_state(seed + saves),
        "global_step": step,
        "phase": 3,
        "config": {"lr": 3e-4, "name": "bench"},
        "metrics": {"mu": 25.0 + saves, "sigma": 1.2},
    }


def hydra(scale: float = 1.0) -> Training:
    """Start the Hydra run; a scale below 1 is about that part of its parameters."""
    return Training(hydra_shapes(scale), HYDRA_DTYPE, SEED)


def lm(scale: float = 1.0) -> Training:
    """Start the language model's run; a scale below 1 is about that part of its parameters."""
    return Training(lm_shapes(scale), LM_DTYPE, SEED + 1)


def blank(workload: str, scale: float = 1.0) -> State:
    """Return a state of a workload's shapes in memory that has been touched, and make no other.

    It is there to be loaded into by a process whose memory is measured: what else had been made
    before would be free then, and taken again unseen.
    """
    shapes, dtype = {
        "hydra": (hydra_shapes(scale), HYDRA_DTYPE),
        "lm": (lm_shapes(scale), LM_DTYPE),
    }[workload]

    def moments(shape: tuple[int, ...]) -> dict[str, Tensor]:
        parts = {part: torch.ones(shape) for part in ("exp_avg", "exp_avg_sq")}
        return {"step": torch.ones(())} | parts

    saved = {
        name: (torch.ones(shape, dtype=dtype), moments(shape)) for name, shape in shapes.items()
    }
    return _assembled(saved, SEED, 0)


WORKLOADS: Mapping[str, Callable[[float], Training]] = {"hydra": hydra, "lm": lm}


def hydra_shapes(scale: float = 1.0) -> Shapes:
    """Return the parameters of an SE-ResNet with six heads."""
    blocks, channels = _smaller(40, scale), _smaller(256, scale, multiple=16)
    shapes: Shapes = {"stem.conv.weight": (channels, 85, 3), "stem.conv.bias": (channels,)}
    shapes |= {f"stem.norm.{part}": (channels,) for part in ("weight", "bias")}
    for block in range(blocks):
        shapes |= _under(f"blocks.{block}", _residual_block(channels, channels // 16))
    for head, outputs in HYDRA_HEADS.items():
        shapes |= _under(f"head.{head}", _linear("fc1", 192, channels))
        shapes |= _under(f"head.{head}", _linear("fc2", outputs, 192))
    return shapes


def lm_shapes(scale: float = 1.0) -> Shapes:
    """Return the parameters of a GPT with tied embeddings."""
    layers, width = _smaller(12, scale), _smaller(768, scale, multiple=16)
    vocabulary = _smaller(44_544, scale, multiple=64)
    shapes: Shapes = {
        "token_embedding.weight": (vocabulary, width),
        "position_embedding.weight": (1024, width),
    }
    for layer in range(layers):
        shapes |= _under(f"layers.{layer}", _transformer_layer(width))
    return shapes | {"norm.weight": (width,), "norm.bias": (width,)}


def frozen(scale: float = 1.0) -> State:
    """Return what a Hydra run carries and never changes: the KL anchor and the GRP network."""
    anchor = [(name, shape, 0.03) for name, shape in hydra_shapes(scale).items()]
    side = _smaller(1000, scale, multiple=8)
    network = [(f"gru.{index}.weight", (side // 2, side), 0.05) for index in range(10)]
    return {
        "kl_anchor": {name: t.to(torch.bfloat16) for name, t in _frozen_tensors(anchor, SEED + 2)},
        "grp": dict(_frozen_tensors(network, SEED + 3)),
    }


def pool_copy(state: State) -> State:
    """Return the inference-only copy that enters the opponent pool."""
    model = OrderedDict((name, tensor.clone()) for name, tensor in state["model"].items())
    return {"model": model, "version": 1, "global_step": state["global_step"]}


def flatten(state: Any, path: str = "") -> dict[str, Tensor]:
    """Return the tensors of a state by path; plain values are left out."""
    if isinstance(state, Tensor):
        return {path: state}
    if not isinstance(state, Mapping):
        return {}
    tensors: dict[str, Tensor] = {}
    for key, value in state.items():
        tensors |= flatten(value, f"{path}.{key}" if path else str(key))
    return tensors


def size_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Add up the bytes of tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def touch(tensors: Mapping[str, Tensor], every_bytes: int = 64 * 1024) -> None:
    """Change every tensor in place, at its start and once in each interval of bytes.

    No chunk of the state is what it was before, and none comes back within 256 calls.
    """
    for tensor in tensors.values():
        as_bytes(tensor)[::every_bytes] += 1


def as_bytes(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the memory of a contiguous tensor as one row of bytes, not a copy."""
    view: np.ndarray[Any, np.dtype[np.uint8]] = tensor.detach().view(-1).view(torch.uint8).numpy()
    return view


def empty_like(state: Any) -> Any:
    """Return a state of the same shapes in memory that has been touched, to load into."""
    if isinstance(state, Tensor):
        return torch.zeros_like(state).fill_(1)
    if isinstance(state, Mapping):
        return {key: empty_like(value) for key, value in state.items()}
    return state


def _master(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    return torch.empty(shape), torch.empty(shape)


def _smaller(size: int, scale: float, multiple: int = 1) -> int:
    """Shrink one of about three dimensions whose product shrinks by `scale`."""
    return max(1, round(size * scale ** (1 / 3) / multiple)) * multiple


def _under(prefix: str, shapes: Shapes) -> Shapes:
    return {f"{prefix}.{name}": shape for name, shape in shapes.items()}


def _linear(name: str, outputs: int, inputs: int) -> Shapes:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def _residual_block(channels: int, squeezed: int) -> Shapes:
    shapes: Shapes = {}
    for half in (1, 2):
        shapes |= {
            f"conv{half}.weight": (channels, channels, 3),
            f"conv{half}.bias": (channels,),
            f"norm{half}.weight": (channels,),
            f"norm{half}.bias": (channels,),
            f"act{half}.weight": (channels,),
        }
    shapes |= _linear("se.fc1", squeezed, channels) | _linear("se.fc2", 2 * channels, squeezed)
    return shapes | {"layer_scale": (channels,)}


def _transformer_layer(width: int) -> Shapes:
    shapes = {f"norm{half}.{part}": (width,) for half in (1, 2) for part in ("weight", "bias")}
    shapes |= _linear("attention.qkv", 3 * width, width)
    shapes |= _linear("attention.out", width, width)
    return shapes | _linear("mlp.up", 4 * width, width) | _linear("mlp.down", width, 4 * width)


def _optimizer(moments: list[dict[str, Tensor]], step: int) -> State:
    group = {
        "lr": 3e-4 * 0.5 ** (step / 100_000),
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.01,
        "params": list(range(len(moments))),
    }
    return {"state": dict(enumerate(moments)), "param_groups": [group]}


def _rng_state(seed: int) -> State:
    generator = torch.Generator().manual_seed(seed)
    numpy_words = torch.randint(0, 2**31, (624,), generator=generator)
    return {"torch": generator.get_state(), "numpy": numpy_words}


def _frozen_tensors(
    layout: list[tuple[str, tuple[int, ...], float]], seed: int
) -> Iterator[tuple[str, Tensor]]:
    deviates = np.random.Generator(np.random.SFC64(seed))
    for name, shape, spread in layout:
        yield name, torch.from_numpy(deviates.standard_normal(shape, np.float32) * spread)


def _describe(name: str, scale: float) -> str:
    start = time.perf_counter()
    training = WORKLOADS[name](scale)
    before = training.state()
    made = time.perf_counter()
    after = training.next_save()
    moved = time.perf_counter()
    old, new = flatten(before), flatten(after)
    changed = sum(not torch.equal(old[path], new[path]) for path in old)
    weights = before["model"].values()
    return (
        f"{name}: {sum(weight.numel() for weight in weights) / 1e6:.1f} M parameters, "
        f"{len(old)} tensors, {size_bytes(old) / 1e6:.1f} MB, "
        f"model {size_bytes(before['model']) / 1e6:.1f} MB; "
        f"{changed} tensors changed at the next save; "
        f"made in {made - start:.1f} s, next in {moved - made:.1f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the sizes of the workloads.")
    parser.add_argument("--scale", type=float, default=1.0, help="part of the full size")
    scale = parser.parse_args().scale
    for name in WORKLOADS:
        print(_describe(name, scale))
    sizes = {name: size_bytes(tensors) / 1e6 for name, tensors in frozen(scale).items()}
    print("frozen: " + ", ".join(f"{name} {size:.1f} MB" for name, size in sizes.items()))


if __name__ == "__main__":
    main()
