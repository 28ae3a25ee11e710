"""Messages of commands name options and commands, and no call of Python."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest

from holdfast.registry import errors
from tests.registry.cli.calling import Call, walk
from tests.support.source import ROOT, tree

pytestmark = pytest.mark.xdist_group("source")

PYTHON = re.compile(
    r"\w\(|\b(None|True|False)\b|\b\w+=(\.\.\.|[\[{(']|[A-Z]\w*\()|`[a-z_]+\.[a-z_]+`|`\w+_\w+`"
)
#: Rooms whose errors no command raises.
PROGRAMS = (
    "registry/adapters",
    "registry/plots.py",
    "registry/saving/collective",
    "registry/saving/loop",
    "registry/face/rng.py",
)
#: Messages for programs alone, about arguments that no command passes.
FOR_PROGRAMS = {
    "Open it without `input_hash`, or create another run.",
    "Retention(last=3)",
    "Monitor(metric='loss', mode='min'), or several",
    "Monitor(metric=..., mode=...)",
    "holdfast.Storing(...)",
    "Ask with `run.best(monitor=...)`, or create another run.",
    "Copy it first: .clone() or .copy().",
    "Give each memory of its own: .clone() or .copy().",
    "a string, or None",
    "`tensors()` lists the paths.",
    "`load_into` fills tensors without them; another checkpoint may be intact.",
    "For example precision={'model/*': 'bf16'}.",
    "X.state_dict() failed",
    "Use str(key), or wrap the dict: {'state': ...}.",
    "a state must be a dict with string keys, or have state_dict()",
    "Pass it to `registry.run`, or to `run.phases.start`, which compare it.",
    "last, best, every or for_days: whole numbers from 1; then: a list of components; or all=True",
    "Append a number (x.item()) or a list (x.tolist()); keep arrays in a state.",
    "Give them to `holdfast.open`.",
    "Carry what is only in it (`holdfast journal push`), or the ranks continue from an older "
    "checkpoint; then open the registry with journal=''.",
    "Make another: jax.make_array_from_callback(shape, sharding, lambda index: "
    "checkpoint[path][index]).",
    "A client of Dask makes one: `client.get_executor()`.",
    "Call `run.restore()`, which applies it.",
    "With busy='wait' the call waits for the earlier save instead.",
    "run.restore(at=reg.checkpoint('RUN/...'))",
    "Load it with `checkpoint.load()`, or fork a new run from it.",
    "the module that will load the part, or its state_dict()",
    "a checkpoint or a release, of any run: reg.checkpoint('RUN/best')",
    "carry=[...] with some of X",
    "A preset can say it by `warm_start`, or by `inference`.",
    "Pass the URL and, for a checkpoint, its ref: the other process opens them with "
    "holdfast.open(URL) and .checkpoint(REF).",
    "Give an object, such as fsspec.filesystem('s3', ...).",
}
#: Names of the bytes on a store, of presets and of HTTP.
NAMES = ("`must_change`", "`registry.json`", "`If-None-Match: *`")


@cache
def messages() -> list[tuple[str, str]]:
    """Return each part of a message that a command may show, with its place."""
    return list(_messages())


def _messages() -> Iterator[tuple[str, str]]:
    for path in sorted(
        one for base in ("registry", "backends") for one in (ROOT / base).rglob("*.py")
    ):
        where = path.relative_to(ROOT).as_posix()
        parsed = tree(path)
        # The advice of findings; the constants of the catalog are queries of a database.
        if where.startswith("registry/upkeep") and path.name != "catalog.py":
            for one in parsed.body:
                if isinstance(one, ast.Assign):
                    yield from ((f"{where}:{one.lineno}", text) for text in texts(one.value))
        for node in ast.walk(parsed):
            if not isinstance(node, ast.Call) or where.startswith(PROGRAMS):
                continue
            name = getattr(node.func, "id", "")
            keywords = [one.value for one in node.keywords]
            parts = [*node.args[:1], *keywords] if name in errors.__all__ else []
            if name == "Hint":
                parts = [*node.args[1:], *(one.value for one in node.keywords if one.arg == "cli")]
            elif is_hint_of(node.func):
                parts = node.args
            for part in parts:
                yield from ((f"{where}:{part.lineno}", text) for text in texts(part))


def is_hint_of(called: ast.expr) -> bool:
    return (
        isinstance(called, ast.Attribute)
        and called.attr == "of"
        and getattr(called.value, "id", "") == "Hint"
    )


def texts(part: ast.expr) -> Iterator[str]:
    match part:
        case ast.Constant(value=str() as text):
            yield text
        case ast.JoinedStr():
            yield "".join(
                one.value if isinstance(one, ast.Constant) else "X" for one in part.values
            )
        case ast.Call() | ast.Name():
            return
        case _:
            for child in ast.iter_child_nodes(part):
                if isinstance(child, ast.expr):
                    yield from texts(child)


def test_no_message_of_a_command_speaks_python() -> None:
    found = dict(messages())
    assert len(found) > 500
    assert set(found.values()) >= FOR_PROGRAMS
    said = {where: text for where, text in found.items() if text not in FOR_PROGRAMS}
    for name in NAMES:
        said = {where: text.replace(name, "") for where, text in said.items()}
    assert not {where: text for where, text in said.items() if PYTHON.search(text)}


def test_every_message_names_options_and_commands_that_exist() -> None:
    flags = {flag for _, command in walk() for one in command.params for flag in one.opts}
    names = {" ".join(path) for path, _ in walk()}
    for where, text in messages():
        assert set(re.findall(r"`(--[a-z-]+)", text)) <= flags, where
        for name in re.findall(r"`holdfast ([a-z]+(?: [a-z]+)?)", text):
            assert name in names or name.partition(" ")[0] in names, where


def test_a_hint_is_shown_in_the_words_of_the_command(call: Call) -> None:
    refused = call("prune", "demo", status=3).stderr
    assert "hint: Give a policy, such as `--last 3`.\n" in refused
    assert "Retention" not in refused


def test_what_pip_shall_install_is_quoted() -> None:
    """Without quotes a shell takes `[formats]` for a pattern; zsh refuses the command."""
    bare = re.compile(r"pip install [^'`]*\[")
    assert not [(where, text) for where, text in messages() if bare.search(text)]
