"""Lightning's strategies that shard: their states as an unsharded training has them, and back.

`FSDPStrategy` (FSDP1) and `ModelParallelStrategy` (FSDP2, tensor parallelism) gather a state or
write files of their own, past every plugin. So each rank's part is taken from torch instead.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from holdfast.registry.adapters.sharded import check_group, load_around
from holdfast.registry.errors import IncompatibleState, InvalidInput
from holdfast.registry.face import Run
from holdfast.registry.loading import Checkpoint

_WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def is_sharding(strategy: Strategy, run: Run) -> bool:
    """Return whether a strategy shards the model."""
    if not strategy.restore_checkpoint_after_setup:
        return False
    name = type(strategy).__name__
    if not isinstance(strategy, FSDPStrategy | ModelParallelStrategy):
        raise InvalidInput(
            "this sharded strategy is not supported",
            where="Trainer(strategy=...)",
            expected="FSDPStrategy, ModelParallelStrategy, or one whose ranks hold the whole model",
            found=name,
        )
    check_group(run, "Trainer(strategy=...)", name)
    return True


@contextmanager
def own_parts(strategy: Any) -> Iterator[None]:
    """Let each rank dump its own part of model and optimizers."""
    strategy.lightning_module_state_dict = lambda: _model_state(strategy.model)
    strategy.optimizer_state = lambda one: _numbered(_moments(strategy.model, one))
    try:
        yield
    finally:
        del strategy.lightning_module_state_dict, strategy.optimizer_state


def load(trainer: Trainer, run: Run, found: Checkpoint) -> dict[str, Any]:
    """Fill model and optimizers in place; return everything else of a checkpoint by component."""
    strategy: Any = trainer.strategy
    trains = trainer.state.fn == TrainerFn.FITTING
    target: dict[str, Any] = {"model": _model_state(strategy.model)}
    optimizers = strategy.optimizers if trains else []
    named = [_moments(strategy.model, one) for one in optimizers]
    if trains:
        target["optimizer"] = [_numbered(one) for one in named]
    is_strict = trainer.lightning_module.strict_loading
    state = load_around(run, found, target, trains=trains, strict=is_strict)
    weights, moments = state.pop("model", {}), state.pop("optimizer", [])
    set_model_state_dict(strategy.model, weights, options=StateDictOptions(strict=is_strict))
    if len(moments) != len(named):
        raise IncompatibleState(
            "the checkpoint has the states of other optimizers",
            where=found.ref,
            expected=f"{len(named)} optimizers",
            found=str(len(moments)),
        )
    # A parameter that never had a gradient has no moments.
    options = StateDictOptions(strict=False)
    for optimizer, own, one in zip(optimizers, named, moments, strict=True):
        set_optimizer_state_dict(strategy.model, optimizer, _by_name(one, own), options=options)
    return state


def _model_state(model: Any) -> Any:
    """Return the state of a module, with the versions of its parts by their own names."""
    state: Any = get_model_state_dict(model)
    versions = getattr(state, "_metadata", None)
    if versions is not None:
        state._metadata = OrderedDict((_unwrapped(key), one) for key, one in versions.items())
    return state


def _unwrapped(name: str) -> str:
    return ".".join(step for step in name.split(".") if step not in _WRAPPERS)


def _moments(model: Any, optimizer: Any) -> dict[str, Any]:
    """Return the state of an optimizer by the names of parameters."""
    return get_optimizer_state_dict(model, optimizer)


def _names(state: Mapping[str, Any]) -> list[str]:
    return [name for group in state["param_groups"] for name in group["params"]]


def _numbered(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of an optimizer by the numbers of parameters, as it has them unsharded."""
    number = {name: n for n, name in enumerate(_names(state))}
    return _renamed(state, number, sorted(state["state"], key=number.__getitem__))


def _by_name(state: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    names = dict(enumerate(_names(own)))
    return _renamed(state, names, list(state["state"]))


def _renamed(
    state: Mapping[str, Any], names: Mapping[Any, Any], order: list[Any]
) -> dict[str, Any]:
    groups = state["param_groups"]
    return {
        **state,
        "state": {names[one]: state["state"][one] for one in order},
        "param_groups": [{**one, "params": [names[p] for p in one["params"]]} for one in groups],
    }
