"""Lightning's `CheckpointIO`: checkpoints of a run behind paths and `holdfast://` refs.

Lightning's strategies that shard have their states as an unsharded training has them, and back:
`FSDPStrategy` (FSDP1) and `ModelParallelStrategy` (FSDP2, tensor parallelism) gather a state or
write files of their own, past every plugin. So each rank's part is taken from torch instead.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from pathlib import Path, PurePath
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from holdfast.registry.adapters.saving import (
    OnSave,
    StepSaver,
    check_group,
    checkpoint_of,
    load_around,
)
from holdfast.registry.errors import (
    Conflict,
    IncompatibleState,
    InvalidInput,
    NotFound,
    UnsupportedValue,
)
from holdfast.registry.face import Run
from holdfast.registry.formats.torch import LIGHTNING_NAMES as _NAMES
from holdfast.registry.loading import Checkpoint
from holdfast.registry.saving import Restored

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
    by_name = partial(get_optimizer_state_dict, strategy.model)
    strategy.optimizer_state = lambda one: _numbered(by_name(one))
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
    named = [get_optimizer_state_dict(strategy.model, one) for one in optimizers]
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


SCHEME = "holdfast://"
#: The key of a checkpoint's meta that holds the path of Lightning's.
_PATH = "lightning_path"
_LONGEST_TAG = 64


class HoldfastIO(CheckpointIO):
    """Keeps Lightning's checkpoints in a run: `Trainer(plugins=[HoldfastIO(run)])`.

    `ckpt_path="holdfast://RUN/latest"`, or any other ref of the run, loads a checkpoint. A path of
    Lightning's own (`.../epoch=1-step=8.ckpt`) names the checkpoint that was saved under it. A
    second save of a step (`save_last=True`) is not stored again: it becomes the tag
    `lightning-last`, with digits of the path if the name is long or another folder has that tag.
    What `ModelCheckpoint` removes is evicted, unless the run protects it or it has another name.
    With a journal, a second name and a removal wait until the registry has the saves before them.

    Alone it stores what Lightning stores, which has no random generators; `HoldfastCheckpoint` adds
    them.

    Args:
        run: The run.
        files: Saves and loads all paths that are no refs. Default: such paths are names of
            checkpoints of the run.
        background: Whether a save returns when the state has been copied.
        on_save: Called with each checkpoint once it is durable.

    Attributes:
        saver: Object that saves into the run.
        trains: Whether a load continues the run; a load to test or to predict does not.
    """

    def __init__(
        self,
        run: Run,
        *,
        files: CheckpointIO | None = None,
        background: bool = False,
        on_save: OnSave | None = None,
    ) -> None:
        self.saver = StepSaver(run, background=background, on_save=on_save)
        self.trains = True
        if files is None and run.handle.ranks is not None:
            raise InvalidInput(
                "Lightning saves through a plugin on rank 0 alone",
                where="HoldfastIO",
                expected="a run without `group`, or HoldfastCheckpoint",
            )
        self._run = run
        self._files = files
        self._restored: Restored | None = None
        self._background = background
        self._keys: set[str] = set()  # of the checkpoint that was saved last
        #: The checkpoints that the save under way overwrites, if it does not fail.
        self._overwritten: list[Checkpoint] = []
        self._unwanted: dict[int, Checkpoint] = {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Save a checkpoint of Lightning's, with the metric that its `ModelCheckpoint` monitors.

        Raises:
            UnsupportedValue: Something in it cannot be stored; the message names its path.
            Conflict: The step was saved already, without a part that this one has.
            RegistryError: As `Run.save`.
        """
        if self._files is not None:
            self._files.save_checkpoint(checkpoint, path, storage_options)
            return
        step = checkpoint.get("global_step")
        if step is None:
            raise InvalidInput(
                "not a checkpoint of Lightning's Trainer: it has no global_step",
                where=f"{path}",
                hint="In a loop with Fabric, call run.save(state, step=...) in place of it.",
            )
        if step == self.saver.step:
            self._check_whole(checkpoint, path)
            self._name_again(path, _metrics(checkpoint, path))
            return
        self._keys = set(checkpoint)
        before, tags = self._saved_as(path), self._tagged(path)
        state, meta = components(checkpoint), {_PATH: str(path)}
        self.saver.save(state, step, _metrics(checkpoint, path), meta)
        self._overwritten = before
        if tags or not self._background:
            self._settle()
        if tags:
            self._untag(tags)
        self._evict_unwanted()

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint, onto the CPU; the run continues from it.

        Raises:
            NotFound: The run has no such checkpoint.
            InvalidInput: The path names another run.
            IntegrityError: It is damaged; no other one is loaded instead.
        """
        text, found = str(path), self.found(path)
        if found is not None:
            return from_components(self._load(found))
        if self._files is None:
            found = self._named(path)
        elif Path(text).exists() or not text.startswith(f"{self._run.id}/"):
            return self._files.load_checkpoint(path, weights_only=weights_only)
        if found is None:
            raise NotFound(
                "there is no such file, and no checkpoint of the run was saved under this path",
                where=f"ckpt_path={text!r}",
                hint=f"A ref finds every checkpoint: {SCHEME}{self._run.id}/latest.",
            )
        return from_components(self._load(found))

    def remove_checkpoint(self, path: Any) -> None:
        """Evict the checkpoint of a path; one that is protected is kept until it is not.

        Of a second name only the tag is removed.
        """
        if self._files is not None:
            self._files.remove_checkpoint(path)
            return
        self._run.wait(remote=True)  # the registry evicts only checkpoints that it has
        found = self._named(path)
        if found is None:
            return
        self._untag(self._tagged(path))
        if _path_of(found) == str(path):
            self._unwanted[found.handle.n] = found
        self._evict_unwanted()

    def teardown(self) -> None:
        """Wait for the save under way, and raise its error."""
        self._settle()
        self._evict_unwanted()

    def resume(self) -> str | None:
        """Load the newest whole checkpoint; return its path, or `None` before the first save.

        Where all ranks save, it is loaded when the trainer has sharded the model.
        """
        if self._run.handle.ranks is not None:
            newest = self._run.restore_into({}, strict=False)
            return None if newest is None else f"{SCHEME}{newest.ref}"
        self._restored = self._run.restore()
        return None if self._restored is None else f"{SCHEME}{self._restored.checkpoint.ref}"

    def found(self, path: Any) -> Checkpoint | None:
        """Return the checkpoint of a ref; `None` for another path.

        Raises:
            NotFound: The run has no such checkpoint.
            InvalidInput: The ref names another run.
        """
        scheme, _, ref = str(path).partition(SCHEME)
        if scheme or not ref:
            return None
        # The one resumed from may be only in a journal.
        if self._restored is not None and self._restored.checkpoint.ref == ref:
            return self._restored.checkpoint
        return checkpoint_of(self._run, ref)

    def _load(self, found: Checkpoint) -> Any:
        if not self.trains:
            return found.load(precision="original")
        kept, self._restored = self._restored, None
        self.saver.resume_at(found.step)
        if kept is not None and kept.checkpoint == found:
            return kept.state
        restored = self._run.restore(at=found)
        assert restored is not None  # `at` names one
        return restored.state

    def _named(self, path: Any) -> Checkpoint | None:
        """Return the newest checkpoint that a path of Lightning's names, by a tag as well."""
        named = [*self._saved_as(path), *self._tagged(path).values()]
        return max(named, key=lambda one: one.handle.n, default=None)

    def _tagged(self, path: Any) -> dict[str, Checkpoint]:
        """Return the tags that are second names of a path, each with its checkpoint."""
        tags, (short, own) = self._run.manifest.tags, _tags(path)
        found = {
            tag: self._run.history.checkpoint(tags[tag]) for tag in (short, own) if tag in tags
        }
        if short in found and short != own and not _is_beside(path, found[short]):
            del found[short]  # another folder has a file of this name
        return found

    def _saved_as(self, path: Any) -> list[Checkpoint]:
        """Return the newest checkpoint that was saved under a path, without those it tags."""
        self._settle()
        return [one for one in self._run.checkpoints() if _path_of(one) == str(path)][-1:]

    def _check_whole(self, checkpoint: Mapping[str, Any], path: Any) -> None:
        """Refuse a second name for a state that has less, as `save_weights_only=True` saves it."""
        lacking = ", ".join(sorted(checkpoint.keys() - self._keys)) if self._keys else ""
        if lacking:
            raise Conflict(
                "a run has one state of a step, and this step was saved with less",
                where=f"{path}",
                expected=lacking,
                hint="Put a ModelCheckpoint with save_weights_only=True behind the others.",
            )

    def _name_again(self, path: Any, metrics: Mapping[str, float]) -> None:
        newest = self._settle()
        self._run.wait(remote=True)  # the registry names only checkpoints that it has
        if newest is None or self._named(path) == newest:
            return
        before, tagged, (short, own) = self._saved_as(path), self._tagged(path), _tags(path)
        is_free = short in tagged or short not in self._run.manifest.tags
        tag = short if is_free and _is_beside(path, newest) else own
        self._run.pins.tags.set(tag, newest)
        if not metrics.keys() <= newest.metrics.keys():
            newest.report(metrics)
        self._untag(tagged.keys() - {tag})
        self._overwritten = before
        self._settle()
        self._evict_unwanted()

    def _untag(self, tags: Iterable[str]) -> None:
        self._run.wait(remote=True)  # a name stays until the registry has the other checkpoint
        for tag in tags:
            self._run.pins.tags.remove(tag)

    def _settle(self) -> Checkpoint | None:
        """Wait for the save under way; what it overwrote is not wanted then; one with a tag stays.

        If the save failed, its error is raised, and the old one keeps its name.
        """
        overwritten, self._overwritten = self._overwritten, []
        newest = self.saver.settle()
        self._unwanted |= {one.handle.n: one for one in overwritten}
        return newest

    def _evict_unwanted(self) -> None:
        for n, checkpoint in list(self._unwanted.items()):
            try:
                self._run.retention.evict(checkpoint, "removed by Lightning's ModelCheckpoint")
            except Conflict:  # protected: tried again after the next save
                if not self._run.history.checkpoint(n).is_evicted:
                    continue
            del self._unwanted[n]


def components(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint of Lightning's as components."""
    taken = sorted(set(_NAMES.values()) & checkpoint.keys())
    if taken:
        raise UnsupportedValue(
            "a hook added a key that is the name of a component",
            where=f"checkpoint[{taken[0]!r}]",
            hint="Choose another key in `on_save_checkpoint`.",
        )
    return {_NAMES.get(name, name): value for name, value in checkpoint.items()}


def _tags(path: Any) -> tuple[str, str]:
    """Return legal tags for a path: `lightning-last` for `.../last.ckpt`, and one of its own."""
    text = f"lightning-{re.sub('[^A-Za-z0-9._-]', '-', PurePath(str(path)).stem)}"
    own = f"{text[:55]}-{sha256(str(path).encode()).hexdigest()[:8]}"
    return text if len(text) <= _LONGEST_TAG else own, own


def _is_beside(path: Any, checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint was saved under a path in the folder of this one."""
    first = _path_of(checkpoint)
    return first is not None and PurePath(first).parent == PurePath(str(path)).parent


def _path_of(checkpoint: Checkpoint) -> str | None:
    meta = checkpoint.meta
    return meta.get(_PATH) if isinstance(meta, Mapping) else None


def from_components(state: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `components`."""
    names = {ours: theirs for theirs, ours in _NAMES.items()}
    return {names.get(name, name): value for name, value in state.items()}


def _metrics(checkpoint: Mapping[str, Any], path: Any) -> dict[str, float]:
    """Return the values of metrics by which `ModelCheckpoint`s save under this path.

    Only those are of this step: `current_score` is of the last step that a callback has saved.
    """
    states = [one for one in checkpoint.get("callbacks", {}).values() if isinstance(one, Mapping)]
    return {
        one["monitor"]: float(one["best_k_models"][str(path)])
        for one in states
        if one.get("monitor") is not None and str(path) in one.get("best_k_models", ())
    }
