"""Verify that a training run resumes exactly: compare a straight run with a resumed one.

`verify_resume` runs both in scratch registries, compares the ids of their last checkpoints, and
names the first difference and its usual causes. The command `verify-resume` gives it a training
that runs in processes of its own.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

from holdfast.registry.comparing import Diff, diff
from holdfast.registry.errors import InvalidInput
from holdfast.registry.face import rng
from holdfast.registry.face.factory import init, open  # noqa: A004
from holdfast.registry.face.registry import Registry
from holdfast.registry.history import check_step, plain_values
from holdfast.registry.loading import Checkpoint
from holdfast.registry.pytree import leaf_paths
from holdfast.registry.values import Digest

#: Trains to a step in the registry at a path, which it continues if it has trained there before.
Segment = Callable[[Path, int], object]
Train = Callable[[Registry, int], object]

_SEED = (
    "seed every generator that is captured, used or not, and choose deterministic kernels "
    "(torch.use_deterministic_algorithms(True), one thread)"
)
#: Words in the paths of a state, the part that they belong to, and advice if it has none of them.
_PARTS = (
    (
        re.compile(r"rng|random|generator|mt19937|pcg64|philox"),
        "random number generators",
        "save holdfast.rng.capture() with the state, and restore it",
    ),
    (
        re.compile(r"optim|exp_avg|adam|moment|(^|/)[mv]($|/)"),
        "optimizer state",
        "save optimizer.state_dict() with the state, and load it",
    ),
    (
        re.compile(r"loader|sampler|dataset|data_|position|epoch|batch"),
        "position in the data",
        "save the state_dict() of a StatefulDataLoader, or the sampler's position",
    ),
    (
        re.compile(r"sched|(^|[/_])lr($|[/_])"),
        "learning rate schedule",
        "save scheduler.state_dict() with the state, and load it",
    ),
)
#: How the names of values end that a clock measured, such as the HF Trainer's.
_CLOCKS = ("_runtime", "_per_second")
_ELSEWHERE = (
    "something outside the state changes the training: a generator that capture() was not given, "
    "dropout or augmentation in workers, a gradient scaler, accumulated gradients, an average of "
    "weights, a cache"
)


@dataclass(frozen=True, slots=True)
class ResumeReport:
    """The comparison of a straight training and a resumed one.

    Attributes:
        steps: The step at which they were compared.
        resumed_at: The step at which the one was ended and resumed.
        straight: Id of the state of the straight one.
        resumed: Id of the state of the resumed one.
        difference: What differs; `None` if nothing does, or measured times alone: values whose
            names end on `_runtime` or `_per_second`. What differs between two straight trainings as
            well is left out, unless there is nothing else.
        first: Path of the first tensor that differs, or of the first plain value if no tensor does.
        is_deterministic: Whether a second straight training was equal to the first; `None` if none
            was needed.
        causes: Usual causes of such a difference, the likeliest first.
    """

    steps: int
    resumed_at: int
    straight: Digest
    resumed: Digest
    difference: Diff | None = None
    first: str | None = None
    is_deterministic: bool | None = None
    causes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the resumed training is bit for bit the straight one, but for measured times."""
        return self.difference is None


def verify_resume(
    train: Callable[[Registry, int], object], *, steps: int, resume_at: int | None = None
) -> ResumeReport:
    """Train straight, and with a resume on the way, and compare the two bit for bit.

    The training runs in this process, two to three times, in scratch registries that are deleted
    afterwards. Before each part the global generators are set to other numbers, as in another
    process. For a program in processes of its own use the command `holdfast verify-resume`.

    Args:
        train: Called with an open registry and a step. It opens or creates a run there, restores
            it, trains, saves at exactly that step, and returns.
        steps: The step at which both are compared, from 2.
        resume_at: The step at which the second one is ended and resumed. Default: half of `steps`.

    Raises:
        InvalidInput: The steps are not legal, or the program did not save the expected steps.
    """
    before = rng.capture()
    parts = iter(range(1, 9))

    def segment(place: Path, stop: int) -> None:
        _disturb(next(parts))
        with open(place, remember=False) as registry:
            train(registry, stop)

    try:
        return verify_segments(segment, steps=steps, resume_at=resume_at)
    finally:
        rng.restore(before)


def verify_segments(segment: Segment, *, steps: int, resume_at: int | None) -> ResumeReport:
    """Compare a straight training and a resumed one; see `verify_resume`."""
    stop = check_step(steps)
    half = stop // 2 if resume_at is None else check_step(resume_at)
    if not 0 < half < stop:
        raise InvalidInput(
            "a training is resumed between its first step and its last",
            where="resume_at",
            expected=f"a step from 1, before {stop}",
            found=half,
        )
    with TemporaryDirectory(prefix="holdfast-verify-resume-") as folder:
        straight = _trained(segment, Path(folder, "straight"), [stop])
        resumed = _trained(segment, Path(folder, "resumed"), [half, stop])
        compared = _without_clocks(diff(straight[-1].handle, resumed[-1].handle))
        if compared is None:
            return ResumeReport(stop, half, straight[-1].digest, resumed[-1].digest)
        again = _trained(segment, Path(folder, "again"), [stop])
        against = _without_clocks(diff(straight[-1].handle, again[-1].handle)) or Diff((), (), ())
        found, noise = _without_noise(compared, against)
        return ResumeReport(
            steps=stop,
            resumed_at=half,
            straight=straight[-1].digest,
            resumed=resumed[-1].digest,
            difference=found,
            first=next(_differing(found), None),
            is_deterministic=noise is None,
            causes=tuple(_causes(found, resumed[0], noise)),
        )


def _without_clocks(found: Diff) -> Diff | None:
    """Leave out values that a clock measured; return `None` if nothing else differs."""
    if found.is_same:
        return None
    left = [one for one in found.values if not one.path.endswith(_CLOCKS)]
    is_clock = len(left) < len(found.values) and not left and not found.differing
    return None if is_clock else replace(found, values=tuple(left))


def _without_noise(resumed: Diff, again: Diff) -> tuple[Diff, str | None]:
    """Drop differences that also occur between two straight runs."""
    noise = set(_differing(again))
    left = replace(
        resumed,
        tensors=tuple(one for one in resumed.tensors if one.path not in noise),
        values=tuple(one for one in resumed.values if one.path not in noise),
    )
    is_of_resume = next(_differing(left), None) is not None
    return left if is_of_resume else resumed, next(_differing(again), None)


def _trained(segment: Segment, place: Path, stops: Sequence[int]) -> list[Checkpoint]:
    """Train in a new registry, with a resume after each step but the last."""
    init(place, skip_race_probe=True).close()
    found = []
    for stop in stops:
        segment(place, stop)
        with open(place, read_only=True, remember=False) as registry:
            found.append(_saved(registry, stop))
    return found


def _saved(registry: Registry, stop: int) -> Checkpoint:
    names = registry.run_names()
    latest = registry.run(names[0]).latest() if len(names) == 1 else None
    if latest is None or latest.step != stop:
        at = "nothing" if latest is None else f"step {latest.step}"
        raise InvalidInput(
            "the training did not save the step that it was asked to stop at",
            where=f"{registry.url}: step {stop}",
            expected=f"one run whose newest checkpoint is step {stop}",
            found=at if len(names) < 2 else f"{len(names)} runs",
            hint="It has to use the registry and the step that it is given: HOLDFAST_REGISTRY and "
            "HOLDFAST_STOP_STEP for a program.",
        )
    return latest


def _disturb(number: int) -> None:
    """Set the global generators to other numbers, as if this were another process."""
    random.seed(number)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(number)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(number)


def _differing(found: Diff) -> Iterator[str]:
    """Yield the paths that differ: tensors first, each kind in the order of the state."""
    yield from (one.path for one in found.differing)
    yield from (one.path for one in found.values)


def _causes(found: Diff, source: Checkpoint, noise: str | None) -> Iterator[str]:
    """Yield the usual causes of such a difference, by the parts of the state."""
    parts = source.manifest.components
    leaves = (leaf_paths(name, part.skeleton).values() for name, part in parts.items())
    paths = [*chain.from_iterable(leaves), *plain_values(parts)]
    differing = list(_differing(found))
    if noise in differing:
        yield (
            f"two straight trainings differ as well ({noise}), so the resume is not the cause: "
            f"{_SEED}"
        )
        return
    for words, part, advice in _PARTS:
        if not _named(words, paths):
            yield f"the state has no {part}: {advice}"
        elif part != "optimizer state" and (first := _named(words, differing)):
            yield (
                f"the {part} differ ({first}): not restored, restored too early (making a loader "
                "or a model draws numbers), or used another number of times"
            )
    unlike = [one.name for one in found.components if one.kind != "same"]
    yield (
        f"a part of the state is not loaded back ({', '.join(unlike)}): each part that is saved "
        "has to be given to its object after `restore`, also the optimizer's"
    )
    yield _ELSEWHERE
    if noise is not None:
        yield f"two straight trainings differ elsewhere ({noise}), which is left out here: {_SEED}"


def _named(words: re.Pattern[str], paths: Sequence[str]) -> str | None:
    return next((path for path in paths if words.search(path.lower())), None)
