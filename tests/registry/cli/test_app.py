"""The table of commands: it says of each command what the command says of itself."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from inspect import getdoc

import pytest

from holdfast.registry.cli import app, opening
from holdfast.registry.face.factory import open as open_registry
from tests.registry.cli.calling import Call, walk


def entries() -> Iterator[str]:
    yield from app._COMMANDS.values()
    for _, commands in app._GROUPS.values():
        yield from commands.values()


@pytest.mark.parametrize("entry", list(entries()))
def test_the_first_sentence_of_the_help_is_that_of_the_list(entry: str) -> None:
    where, _, about = entry.partition(": ")
    module, _, function = where.partition(".")
    command = getattr(import_module(f"{app.__package__}.{module}"), function)
    help_text = getdoc(command)
    assert help_text is not None
    assert " ".join(help_text.partition("\n\n")[0].split()) == about


@pytest.mark.parametrize("command", ["gc", "repack", "prune demo --last 1"])
def test_a_dry_run_opens_the_registry_for_reading(
    command: str, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []

    def opened(url: str, *, read_only: bool, **options: object) -> object:
        found.append(read_only)
        return open_registry(url, read_only=read_only)

    monkeypatch.setattr(opening, "open", opened)
    call(*command.split(), "--dry-run")
    call(*command.split())
    assert found == [True, False]


def test_no_help_is_cut_or_wider_than_a_terminal(call: Call) -> None:
    paths = [(), *((group,) for group in app._GROUPS), *(path for path, _ in walk())]
    helps = {path: call(*path, "--help").stdout for path in paths}
    for path, text in helps.items():
        assert max(map(len, text.splitlines())) <= 80, path
    commands = dict(walk())
    for path, text in helps.items():
        words = " ".join(text.split())
        below = {**app._COMMANDS} if not path else app._GROUPS.get(path[0], ("", {}))[1]
        for entry in below.values() if path not in commands else ():
            assert entry.partition(": ")[2] in words, path
        for one in commands[path].params if path in commands else ():
            assert one.hidden or " ".join((one.help or "").split()) in words, (path, one.name)
        if path in commands:
            assert " ".join((commands[path].help or "").split()) in words, path
    for about, _ in app._GROUPS.values():
        assert about in " ".join(helps[()].split())


#: Options that mean one thing in one command and another thing in another.
OF_THE_COMMAND = {"--metric", "--from", "--to", "--precision"}


@pytest.mark.parametrize(
    "command",
    [
        "push  demo --step 1",
        "pull demo --to ",
        "checkout demo ",
        "import ",
        "stream append demo x ",
    ],
)
def test_no_path_is_empty(command: str, call: Call) -> None:
    # `Path("")` is the current folder, which a script with an unset variable does not mean.
    assert "the path is empty" in call(*command.split(" "), status=2).stderr


def test_one_thing_has_one_name() -> None:
    metavars: dict[str, set[str | None]] = {}
    helps: dict[str, set[str]] = {}
    for _, command in walk():
        for one in command.params:
            for flag in one.opts if one.param_type_name == "option" and not one.hidden else ():
                metavars.setdefault(flag, set()).add(one.metavar)
                helps.setdefault(one.help, set()).add(flag)
    several = {flag for flag, found in metavars.items() if len(found) > 1}
    assert several <= OF_THE_COMMAND
    assert {about: flags - {"-r", "-h"} for about, flags in helps.items() if len(flags) > 1} == {
        about: {"--registry"} for about in helps if "--registry" in helps[about]
    } | {about: {"--help"} for about in helps if "--help" in helps[about]}
