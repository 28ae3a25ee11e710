"""The table of commands: it says of each command what the command says of itself."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from inspect import getdoc

import pytest

from holdfast.registry.cli import app, opening
from holdfast.registry.factory import open as open_registry
from tests.registry.cli.calling import Call


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
