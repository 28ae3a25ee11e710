"""Run commands for checkpoints: fill in placeholders, start, wait, end."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

from holdfast.registry.errors import InvalidInput
from holdfast.registry.loading import Checkpoint
from holdfast.registry.store import Address
from holdfast.registry.values import near

# Seconds that a command has to end after SIGTERM, before it is killed.
_GRACE_S = 10
# `${name}` belongs to a shell, if the command is one; `{{name}}` gives `{name}` itself.
_PLACE = re.compile(r"\{\{(?P<kept>[A-Za-z_]+)\}\}|(?<!\$)\{(?P<name>[A-Za-z_]+)\}")
_NAMES = ("ref", "id", "run", "step", "phase")


class Command:
    """A command in which {ref}, {id}, {run}, {step} and {phase} stand for a checkpoint."""

    def __init__(
        self, words: Sequence[str], *, where: str, as_shell: str, names: Sequence[str] = _NAMES
    ) -> None:
        self._words = words
        self._as_shell = as_shell
        for place in _PLACE.finditer(" ".join(words)):
            name = place["name"]
            if name and name not in names:
                meant = f"{near(name, names) or ''} ".lstrip()
                raise InvalidInput(
                    "no such placeholder",
                    where=f"{where} {{{name}}}",
                    expected=", ".join(f"{{{one}}}" for one in names),
                    hint=f"{meant}Write {{{{{name}}}}} for these very characters.",
                )
        if not _PLACE.search(words[0]) and shutil.which(words[0]) is None:
            raise self._not_startable(words[0], "no such command")

    def run(self, checkpoint: Checkpoint, address: Address, *, stdout: int | None = None) -> int:
        """Run it for a checkpoint to its end; if this process ends first, so does the command."""
        return self.run_with(_values(checkpoint), address, stdout=stdout)

    def run_with(
        self, values: Mapping[str, str], address: Address, *, stdout: int | None = None
    ) -> int:
        """Run it with values by name, to its end."""

        def fill(one: re.Match[str]) -> str:
            return f"{{{one['kept']}}}" if one["kept"] else values[one["name"]]

        arguments = [_PLACE.sub(fill, word) for word in self._words]
        named = {f"HOLDFAST_{name.upper()}": value for name, value in values.items()}
        environment = {**os.environ, **named, **address.environment()}
        try:
            return run_to_end(arguments, environment, stdout)
        except (OSError, ValueError) as error:
            raise self._not_startable(arguments[0], str(error)) from error

    def _not_startable(self, name: str, why: str) -> InvalidInput:
        return InvalidInput(
            "the command cannot be started",
            where=name,
            found=why,
            hint=f"It is run without a shell: write {self._as_shell} for one.",
        )


def run_to_end(arguments: Sequence[str], environment: Mapping[str, str], stdout: int | None) -> int:
    """Run a program to its end; if this process ends first, so does the program."""
    sys.stdout.flush()  # our lines come before the program's
    # A process group of its own, so that the children of the program end with it.
    child = subprocess.Popen(
        arguments, env=environment, stdin=subprocess.DEVNULL, stdout=stdout, process_group=0
    )
    try:
        return child.wait()
    except BaseException:
        end(child)
        raise


def status_text(status: int) -> str:
    """Return in words how a command ended."""
    return f"exit status {status}" if status >= 0 else f"ended by signal {-status}"


def _values(checkpoint: Checkpoint) -> dict[str, str]:
    return {
        "ref": checkpoint.ref,
        "id": checkpoint.digest.hex(),
        "run": checkpoint.run_id,
        "step": str(checkpoint.step),
        "phase": str(checkpoint.phase),
    }


def end(child: subprocess.Popen[bytes]) -> None:
    """End a command and its process group: by SIGTERM, then by SIGKILL."""
    try:
        _signal(child, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            child.wait(_GRACE_S)
    finally:
        _signal(child, signal.SIGKILL)
        child.wait()


def _signal(child: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, number)
