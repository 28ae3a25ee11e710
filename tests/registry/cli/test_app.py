"""The table of commands: it says of each command what the command says of itself."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from inspect import getdoc

import pytest

from registry.cli import app


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
