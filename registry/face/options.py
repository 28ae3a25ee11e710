"""Options that several calls of the face share, each list written once.

A call takes them as `**options: Unpack[SaveOptions]`: type checkers and editors know every name.
`shows_options` puts the names into its signature, for `help` and for completion in notebooks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ForwardRef, TypedDict, TypeVar

if TYPE_CHECKING:  # a program that only reads needs none of them
    import os
    from collections.abc import Collection, Iterable
    from concurrent.futures import Executor

    from holdfast.registry.objects.codecs import Compression
    from holdfast.registry.spec import Monitor, Retention, RunSpec
    from holdfast.registry.store import Progress
    from holdfast.registry.upkeep import Keys
    from holdfast.registry.writing import Storing

_Call = TypeVar("_Call", bound=Callable[..., Any])


class StateOptions(TypedDict, total=False):
    """Options of each call that makes a checkpoint of one state; `Run.save` explains them."""

    phase: int | str | None
    metrics: Mapping[str, object] | None
    meta: object
    tier: str | None
    storing: Storing | None
    allow_nonfinite: bool


class SaveOptions(StateOptions, total=False):
    """Options of a save; `Run.save` explains them."""

    companions: Mapping[str, object] | None
    streams: Mapping[str, Iterable[Mapping[str, Any]]] | None


class NewRun(TypedDict, total=False):
    """Options of a run that is created; `Registry.create_run` explains them."""

    preset: str | os.PathLike[str] | RunSpec | None
    overrides: Mapping[str, object] | None
    config: object
    seed: int | None
    monitor: Monitor | Iterable[Monitor] | None
    retention: Retention | None
    input_hash: str | None
    owner: str | None
    project: str | None
    labels: Iterable[str] | None
    total_steps: int | None


class VerifyOptions(TypedDict, total=False):
    """Options of a verification; `Registry.verify` explains them."""

    deep: bool
    sample: float | None
    resume: str | os.PathLike[str] | None
    decode: bool
    heads: str | os.PathLike[str] | None
    write_heads: str | os.PathLike[str] | None
    since_last: bool
    shard: str | None
    signed: Keys | None
    executor: Executor | None
    progress: Progress | None


class GcOptions(TypedDict, total=False):
    """Options of a collection; `Registry.gc` explains them."""

    grace_s: float
    forget: Collection[str]
    accept: Collection[str]
    full: bool
    dry_run: bool
    shard: str | None
    executor: Executor | None
    progress: Progress | None


class RepackOptions(TypedDict, total=False):
    """Options of a repack; `Registry.repack` explains them."""

    min_dead: float
    compression: Compression | None
    keyframe_every: int | None
    dry_run: bool
    executor: Executor | None
    progress: Progress | None


class Polling(TypedDict, total=False):
    """Options of a loop that follows a run; `RunFollow.checkpoints` explains them."""

    poll_s: float
    longest_poll_s: float
    timeout_s: float | None
    follow: bool


def shows_options(options: type, **defaults: object) -> Callable[[_Call], _Call]:
    """Show the fields of `options` in the signature of a call, each with its default.

    A default that is not given is `False` for a bool and `None` for everything else.
    """

    def show(call: _Call) -> _Call:
        signature = inspect.signature(call)
        own = [
            one
            for one in signature.parameters.values()
            if one.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        shared = [
            _parameter(name, kind, defaults) for name, kind in options.__annotations__.items()
        ]
        call.__signature__ = signature.replace(parameters=[*own, *shared])  # type: ignore[attr-defined]
        return call

    return show


def _parameter(
    name: str, kind: ForwardRef | str, defaults: Mapping[str, object]
) -> inspect.Parameter:
    text = kind.__forward_arg__ if isinstance(kind, ForwardRef) else kind
    default = defaults.get(name, False if text == "bool" else None)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=text)
