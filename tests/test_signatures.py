"""Public signatures: each shows every option with its type and default, and is documented."""

from __future__ import annotations

import ast
import importlib
import inspect
import pydoc
import sys
import typing
from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import combinations
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast import formats
from holdfast.formats import andrea, thalia
from holdfast.registry.curation.pool.entries import PoolEntry
from holdfast.registry.curation.pool.selection import Matchup
from holdfast.registry.curation.releases import Release
from holdfast.registry.face.exchange import RunExchange

OURS = "holdfast"
#: What every record has; users make none.
RECORDS = "holdfast.registry.values.records"
#: Calls that take any number of like things.
VARIADIC = {"RunRetention.undo": "checkpoints"}
ROOMS = Path(__file__).parents[1] / "registry"
#: Names that annotations use and modules import for type checkers alone.
FOR_CHECKERS = {
    "Matchup": Matchup,
    **{
        alias.name: getattr(importlib.import_module(one.module or ""), alias.name)
        for module in (
            *("face/run", "face/registry", "face/phases", "face/exchange", "face/follow"),
            *("face/history", "loading/stored", "loading/checkpoint"),
        )
        for block in ast.parse((ROOMS / f"{module}.py").read_text()).body
        if isinstance(block, ast.If)
        for one in block.body
        if isinstance(one, ast.ImportFrom)
        for alias in one.names
    },
}
STATE_NAMES = {
    *(
        "components",
        "files",
        "lazily",
        "load",
        "load_into",
        "manifest",
        "ref",
        "run_id",
        "size_bytes",
    ),
    *("digest", "handle", "tensors", "zarr"),
}


@pytest.fixture
def reg(tmp_path: Path) -> Iterator[holdfast.Registry]:
    with holdfast.init(tmp_path / "reg", skip_race_probe=True) as made:
        yield made


def is_ours(thing: object) -> bool:
    return str(getattr(thing, "__module__", "")).startswith(OURS)


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties of a class that this project defines."""
    for name in dir(cls):
        found = inspect.getattr_static(cls, name)
        if isinstance(found, classmethod | staticmethod):
            found = found.__func__
        is_made = isinstance(found, property | cached_property) or is_ours(found)
        if not name.startswith("_") and is_made and not isinstance(found, type):
            yield name, found


def function_of(member: Any) -> Callable[..., Any]:
    if isinstance(member, property):
        assert member.fget is not None
        return member.fget
    return member.func if isinstance(member, cached_property) else member


def classes_in(annotation: Any) -> Iterator[type]:
    if isinstance(annotation, type) and is_ours(annotation):
        yield annotation
    for part in typing.get_args(annotation):
        yield from classes_in(part)


def returned(function: Callable[..., Any]) -> Iterator[type]:
    names = {**vars(sys.modules[function.__module__]), **FOR_CHECKERS}
    hint = inspect.get_annotations(function).get("return")
    yield from classes_in(eval(hint, names) if isinstance(hint, str) else hint)


#: The modules with functions of users.
MODULES = (holdfast, formats, andrea, thalia)


def face() -> dict[str, Any]:
    """Return the public functions, and the classes that they return, with their members."""
    found: dict[str, Any] = {}
    todo = [getattr(module, name) for module in MODULES for name in module.__all__]
    while todo:
        one = todo.pop()
        if not callable(one):
            continue
        name = one.__qualname__
        if name in found:
            continue
        found[name] = one
        if not isinstance(one, type):
            todo += returned(one)
            continue
        for at, member in members(one):
            home = function_of(member).__module__
            if home.startswith(OURS) and home != RECORDS and at != "handle":  # not for programs
                found[f"{name}.{at}"] = member
                todo += returned(function_of(member))
    return found


FACE = face()
#: The calls of users; classes count by what makes them where users do that themselves.
CALLS = {name: one for name, one in FACE.items() if not isinstance(one, type)}


def test_the_walk_meets_what_users_hold() -> None:
    met = {"Run.save", "Checkpoint.load", "PoolEntry.win_rate", "Release.card", "Stream.append"}
    assert met | {"Registry.gc", "GcReport", "Retention", "PendingSave.wait", "open"} <= set(FACE)


def test_public_calls_show_every_option_and_are_documented() -> None:
    for name, call in CALLS.items():
        function = function_of(call)
        assert (inspect.getdoc(function) or "").strip(), f"{name} has no docstring"
        signature = inspect.signature(function)
        assert signature.return_annotation is not inspect.Signature.empty, name
        for option in signature.parameters.values():
            if option.name in ("self", "cls"):
                continue
            assert option.annotation is not inspect.Parameter.empty, (name, option)
            assert option.kind is not inspect.Parameter.VAR_KEYWORD, (name, option)
            if option.kind is inspect.Parameter.VAR_POSITIONAL:
                assert VARIADIC.get(name) == option.name, (name, option)


@pytest.mark.parametrize("name", ["Digest", "Monitor", "Retention", "Stopping", "Storing"])
def test_a_value_that_users_make_shows_its_fields(name: str) -> None:
    fields = inspect.signature(getattr(holdfast, name)).parameters.values()
    kinds = {option.kind for option in fields}
    assert kinds
    assert inspect.Parameter.VAR_KEYWORD not in kinds


SAVE = {
    "state": "object",
    "step": "int",
    "phase": "int | str | None = None",
    "metrics": "Mapping[str, object] | None = None",
    "meta": "object = None",
    "tier": "str | None = None",
    "companions": "Mapping[str, object] | None = None",
    "streams": "Mapping[str, Iterable[Mapping[str, Any]]] | None = None",
    "storing": "Storing | None = None",
    "allow_nonfinite": "bool = False",
}


#: What a checkpointer gets with each step.
PER_STEP = {"metrics", "meta", "tier", "companions", "streams"}


def shown(function: Callable[..., Any]) -> dict[str, str]:
    """Return the options of a call as an editor shows them."""
    empty = inspect.Parameter.empty
    return {
        name: option.annotation + ("" if option.default is empty else f" = {option.default!r}")
        for name, option in inspect.signature(function).parameters.items()
        if name != "self"
    }


@pytest.mark.parametrize("call", [holdfast.Run.save, holdfast.Run.save_async, RunExchange.push])
def test_an_editor_completes_the_options_of_a_save(call: Callable[..., Any]) -> None:
    more = {
        holdfast.Run.save_async: {"busy": "Busy = 'wait'", "may_fail": "int = 0"},
        RunExchange.push: {"after": "int | Literal['none'] | None = None"},
    }
    assert shown(call) == SAVE | more.get(call, {})


def test_help_explains_each_option_of_a_save_once() -> None:
    text = pydoc.render_doc(holdfast.Run.save, renderer=pydoc.plaintext)
    for name in SAVE:
        assert text.count(f"\n        {name}: ") == 1, name
    assert len(inspect.signature(holdfast.Run.save).parameters) <= 11  # with `self`
    # One screen; from Python 3.13 on each parameter of the signature has a line of its own.
    assert len(text.splitlines()) <= 50 + 11 * (sys.version_info >= (3, 13))


def public(cls: type) -> set[str]:
    return {name for name in dir(cls) if not name.startswith("_")}


def test_an_editor_completes_no_plumbing_of_a_stored_state() -> None:
    assert public(holdfast.Stored) == STATE_NAMES
    assert public(holdfast.Checkpoint) == STATE_NAMES | {
        *("companion", "companions", "created", "durable_in", "eviction", "is_evicted", "meta"),
        *("metrics", "nonfinite", "parts", "phase", "report", "step", "superseded", "tier"),
    }
    assert public(PoolEntry) == STATE_NAMES | {
        *("checkpoint", "conservative", "evicted", "frozen", "games", "gate", "mu", "phase"),
        *("promoted", "record", "sigma", "step", "version", "win_rate", "wins"),
    }
    assert public(Release) == STATE_NAMES | {
        *("card", "card_yaml", "checkpoint", "is_latest", "metrics", "published", "record"),
        *("source", "source_checkpoint", "version"),
    }


def test_the_attributes_of_handles_are_no_plumbing(reg) -> None:
    run = reg.create_run("run")
    checkpoint = run.save({"w": np.zeros(3)}, step=1)
    assert {name for name in vars(run) if not name.startswith("_")} == set()
    assert {name for name in vars(checkpoint) if not name.startswith("_")} == set()
    assert {name for name in vars(reg) if not name.startswith("_")} == set()


class Stop(Exception):
    """What was passed on is known."""


def passed_on(
    monkeypatch: pytest.MonkeyPatch, call: Callable[..., Any], to: str, *values: object
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Call with another value for each option; return them, and those that are passed on."""
    signature = inspect.signature(typing.cast("Any", pydoc.locate(to)))
    found: dict[str, Any] = {}

    def record(*args: object, **options: object) -> None:
        found.update(signature.bind(*args, **options).arguments)
        raise Stop

    monkeypatch.setattr(to, record)
    options = inspect.signature(call).parameters.values()
    given = {one.name: object() for one in options if one.kind is one.KEYWORD_ONLY}
    with pytest.raises(Stop):
        call(*values, **given)
    return given, found


@pytest.mark.parametrize("name", ["save", "save_async", "exchange.push"])
def test_every_option_of_a_save_is_passed_on(monkeypatch, reg, name: str) -> None:
    call = attrgetter(name)(reg.create_run("run"))
    given, found = passed_on(monkeypatch, call, "holdfast.registry.saving.saver.SaveRequest.of", {})
    given.pop("busy", None)
    assert found == given | {"takes_over": name != "exchange.push", "every_rank": False}


def test_every_option_of_a_merge_is_passed_on(monkeypatch, reg) -> None:
    call, own = reg.create_run("run").exchange.merge, {"average", "weights", "pick", "meta"}
    request = "holdfast.registry.face.exchange.SaveRequest.of"
    given, found = passed_on(monkeypatch, call, request, [])
    assert found == {name: given[name] for name in given.keys() - own} | {"takes_over": False}
    monkeypatch.setattr(request, lambda step, **_: step)
    given, found = passed_on(monkeypatch, call, "holdfast.registry.deriving.merging.merge", [])
    assert {name: found[name] for name in own} == {name: given[name] for name in own}


def test_every_option_of_a_transition_is_passed_on(monkeypatch, reg) -> None:
    call = reg.create_run("run").phases.transition
    given, found = passed_on(
        monkeypatch, call, "holdfast.registry.deriving.transitions.TransitionOptions", 2
    )
    assert found == given


@pytest.mark.parametrize("name", ["checkpoints", "into"])
def test_every_option_of_a_follower_is_passed_on(monkeypatch, reg, name: str) -> None:
    call = getattr(reg.create_run("run").follow, name)
    values = () if name == "checkpoints" else ({},)
    module, times = "holdfast.registry.loading.following", {"poll_s", "longest_poll_s", "timeout_s"}
    given, found = passed_on(monkeypatch, call, f"{module}.Patience", *values)
    assert found == {one: given[one] for one in times}
    monkeypatch.setattr(f"{module}.Patience", lambda **_: "patience")
    to = f"{module}.Watch" if name == "checkpoints" else f"{module}.Following"
    given, found = passed_on(monkeypatch, call, to, *values)
    assert {one: given[one] for one in given.keys() - times}.items() <= found.items()
    assert found["patience"] == "patience"


def test_every_option_of_a_checkpointer_is_passed_on(monkeypatch, reg) -> None:
    call = reg.create_run("run").checkpointer
    monkeypatch.setattr("holdfast.registry.face.run.check_storing", lambda given: given)
    given, found = passed_on(monkeypatch, call, "holdfast.registry.saving.loop.LoopOptions")
    assert found == {**given, "group": None}
    assert given.keys() > set(SAVE) - {"state", "step", *PER_STEP}
    assert len(given) <= 12


@pytest.mark.parametrize("name", ["create_run", "fork", "run"])
def test_every_option_of_a_new_run_is_passed_on(monkeypatch, reg, name: str) -> None:
    source = reg.create_run("source").save({"w": np.zeros(3)}, step=1)
    values = (source, "new") if name == "fork" else ("source",)
    call = getattr(reg, name)
    given, found = passed_on(monkeypatch, call, "holdfast.registry.history.RunOptions", *values)
    assert found == {name: given[name] for name in given.keys() - {"create", "group"}}


def listed(function: Callable[..., Any]) -> frozenset[str]:
    """Return the parameters that a function lists itself."""
    code = inspect.unwrap(function).__code__
    return frozenset(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]) - {"self"}


def test_no_two_public_calls_list_the_same_five_options() -> None:
    """A list that two calls share is a `TypedDict` of `face.options`, or a value."""
    functions = {name: function_of(one) for name, one in CALLS.items()}
    ours = {
        name: listed(one)
        for name, one in functions.items()
        if not one.__module__.startswith("holdfast.registry.formats")  # as Thalia has them
    }
    assert [two for two in combinations(ours, 2) if len(ours[two[0]] & ours[two[1]]) >= 5] == []


def test_the_face_of_a_run_is_small() -> None:
    assert len(public(holdfast.Run)) <= 27
