"""Commands that run within this process."""

from __future__ import annotations

from typing import Any, cast

import click
from click.testing import CliRunner, Result
from typer.main import get_command

from holdfast.registry.cli.app import app

# Typer's own runner puts all commands and their options together at each call.
_COMMAND = cast("click.Command", get_command(app))


def invoke(*arguments: object, **options: Any) -> Result:
    """Run a command; return its status and what it printed."""
    return CliRunner().invoke(_COMMAND, [str(argument) for argument in arguments], **options)
