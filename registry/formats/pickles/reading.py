"""Read one pickle, from bytes to a value."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from holdfast.registry.errors import InvalidInput, RegistryError
from holdfast.registry.formats.pickles.machine import Keys, Machine, Name, Names, damaged
from holdfast.registry.formats.pickles.opcodes import COSTS, STEPS, STOP
from holdfast.registry.values import Budget

#: The most values on the interpreter's stack, and so in one list of the pickle.
MAX_VALUES: Final = 20_000_000
#: What opcodes take is summed up to this many bytes before the budget is asked.
_PART_BYTES: Final = 2**16


def read_pickle(
    data: bytes | memoryview,
    names: Names,
    *,
    where: Path | str,
    persistent: Callable[[Any], Any] | None = None,
    keys: Keys | None = None,
) -> tuple[Any, int]:
    """Read one pickle."""
    keys = keys or Keys(Budget(where, "unpickling it", InvalidInput))
    machine = Machine(memoryview(data), names, str(where), persistent, keys)
    try:
        return _run(machine)
    except RegistryError:
        raise
    except (IndexError, struct.error, UnicodeDecodeError) as error:
        raise damaged(machine, "it ends or breaks off in a wrong place", error) from error
    except (TypeError, ValueError, AttributeError, KeyError, OverflowError) as error:
        raise damaged(machine, "its values do not fit each other", error) from error


def _run(machine: Machine) -> tuple[Any, int]:
    """Follow the opcodes to the end."""
    if machine.data[0] != 0x80:
        raise damaged(machine, "it is older than protocol 2, or no pickle", machine.data[0])
    spent = 0
    while True:
        opcode = machine.data[machine.at]
        machine.at += 1
        spent += COSTS[opcode]
        if spent > _PART_BYTES or opcode == STOP:
            machine.keys.budget.take(spent)
            spent = 0
        if opcode == STOP:
            break
        step = STEPS.get(opcode)
        if step is None:
            raise damaged(machine, "an opcode that is not read", f"{opcode:#04x}")
        step(machine)
        if len(machine.stack) > MAX_VALUES:
            raise damaged(machine, "too many values", len(machine.stack))
    (value,) = machine.stack
    return value.known.value if isinstance(value, Name) else value, machine.at
