"""The effect of each opcode of a pickle on the machine; any other opcode is refused."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from holdfast.registry.errors import InvalidInput, RegistryError
from holdfast.registry.formats.pickles.machine import MARK, Keys, Machine, Name, Names, damaged
from holdfast.registry.values import Budget

#: The most values on the interpreter's stack, and so in one list of the pickle.
MAX_VALUES: Final = 20_000_000
#: What opcodes take is summed up to this many bytes before the budget is asked.
_PART_BYTES: Final = 2**16


_Step = Callable[[Machine], object]


def _number(form: str) -> _Step:
    return lambda machine: machine.push(machine.number(form))


def _long(form: str) -> _Step:
    return _text(form, lambda data: int.from_bytes(data, "little", signed=True))


def _text(form: str, decode: Callable[[memoryview], Any], weight: int = 1) -> _Step:
    def step(machine: Machine) -> None:
        data = machine.take(machine.number(form))
        machine.keys.budget.take(len(data) * weight)
        machine.push(decode(data))

    return step


def _unicode(data: memoryview) -> str:
    return str(data, "utf-8", "surrogatepass")


def _python2_text(data: memoryview) -> str:
    return str(data, "utf-8")


def _tuple_of(count: int) -> _Step:
    return lambda machine: machine.push(tuple([machine.pop() for _ in range(count)][::-1]))


def _new_dict(machine: Machine) -> None:
    values = machine.since_mark()
    machine.push(dict(zip(machine.keys.admit(values[::2]), values[1::2], strict=True)))


def _append(machine: Machine) -> None:
    value = machine.pop()
    machine.top(list, deque).append(value)


def _appends(machine: Machine) -> None:
    values = machine.since_mark()
    machine.top(list, deque).extend(values)


def _set_item(machine: Machine) -> None:
    value, key = machine.pop(), machine.pop()
    target = machine.top(dict)
    machine.keys.admit((key,), target)
    target[key] = value


def _set_items(machine: Machine) -> None:
    values = machine.since_mark()
    target = machine.top(dict)
    target.update(zip(machine.keys.admit(values[::2], target), values[1::2], strict=True))


def _add_items(machine: Machine) -> None:
    values = machine.since_mark()
    target = machine.top(set)
    target.update(machine.keys.admit(values, target))


def _put(form: str) -> _Step:
    return lambda machine: machine.keep(machine.number(form))


def _get(form: str) -> _Step:
    return lambda machine: machine.push(machine.memo[machine.number(form)])


def _stack_global(machine: Machine) -> None:
    name, module = machine.pop(), machine.pop()
    machine.name(module, name)


def _persistent(machine: Machine) -> None:
    key = machine.pop()
    if machine.persistent is None:
        raise damaged(machine, "a persistent id", type(key).__name__)
    machine.push(machine.persistent(key))


STOP: Final = 0x2E
#: Bytes of memory that each opcode takes, besides text and what keys and calls count themselves.
COSTS: Final[Sequence[int]] = [
    {
        **dict.fromkeys((0x5D, 0x7D, 0x6C, 0x64, 0x74, 0x85, 0x86, 0x87), 96),
        **dict.fromkeys((0x8F, 0x91), 256),
        **dict.fromkeys((0x94, 0x71, 0x72), 112),
        0x51: 400,
    }.get(opcode, 32)
    for opcode in range(256)
]
STEPS: Final[Mapping[int, _Step]] = {
    0x80: lambda machine: machine.take(1),  # PROTO
    0x95: lambda machine: machine.take(8),  # FRAME
    0x28: lambda machine: machine.push(MARK),
    0x30: lambda machine: machine.stack.pop(),
    0x31: lambda machine: machine.since_mark(),
    0x32: lambda machine: machine.push(machine.stack[-1]),
    0x4E: lambda machine: machine.push(None),
    0x88: lambda machine: machine.push(True),
    0x89: lambda machine: machine.push(False),
    0x4A: _number("<i"),
    0x4B: _number("<B"),
    0x4D: _number("<H"),
    0x8A: _long("<B"),
    0x8B: _long("<I"),
    0x47: _number(">d"),
    0x58: _text("<I", _unicode, 4),
    0x8C: _text("<B", _unicode, 4),
    0x8D: _text("<Q", _unicode, 4),
    0x54: _text("<I", _python2_text, 4),
    0x55: _text("<B", _python2_text, 4),
    0x42: _text("<I", bytes),
    0x43: _text("<B", bytes),
    0x8E: _text("<Q", bytes),
    0x96: _text("<Q", bytearray),
    0x5D: lambda machine: machine.push([]),
    0x7D: lambda machine: machine.push({}),
    0x8F: lambda machine: machine.push(set()),
    0x29: lambda machine: machine.push(()),
    0x74: lambda machine: machine.push(tuple(machine.since_mark())),
    0x85: _tuple_of(1),
    0x86: _tuple_of(2),
    0x87: _tuple_of(3),
    0x6C: lambda machine: machine.push(machine.since_mark()),
    0x64: _new_dict,
    0x91: lambda machine: machine.push(frozenset(machine.keys.admit(machine.since_mark()))),
    0x61: _append,
    0x65: _appends,
    0x73: _set_item,
    0x75: _set_items,
    0x90: _add_items,
    0x94: lambda machine: machine.keep(len(machine.memo)),
    0x71: _put("<B"),
    0x72: _put("<I"),
    0x68: _get("<B"),
    0x6A: _get("<I"),
    0x63: lambda machine: machine.name(machine.line(), machine.line()),
    0x93: _stack_global,
    0x52: lambda machine: machine.call(),
    0x81: lambda machine: machine.call(),  # NEWOBJ: a class and its arguments
    0x62: lambda machine: machine.build(),
    0x51: _persistent,
}


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
