"""Read a pickle without unpickling it: an interpreter that knows plain values and a closed list.

Python's own unpickler looks names up and calls them, so a pickle is a program. This interpreter
imports nothing and looks nothing up. It follows the opcodes that build plain values; a name is
looked up in the table of its caller, which says for each name how its value is made. Any other name
and any other opcode is refused. Protocols 2 to 5 are read; no program of these formats writes an
older one. The opcodes are those of Python's `pickletools`.
"""

from __future__ import annotations

import struct
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from holdfast.registry.errors import InvalidInput, RegistryError, UnsupportedValue
from holdfast.registry.formats.source import KEEP

#: The most values on the interpreter's stack, and so in one list of the pickle.
MAX_VALUES: Final = 20_000_000
#: How deeply tuples may be nested in a key. Python hashes nested tuples by recursion in C, which
#: has no limit: a deep one would overflow the stack and kill the process.
_MAX_KEY_DEPTH: Final = 8
_HINT: Final = (
    "Nothing in it was run. Save state dicts and plain values only, or call run.save() in the "
    f"program that has the objects. {KEEP}"
)
_PLAIN_KEYS: Final = (str, int, float, bool, bytes, complex, type(None))


@dataclass(frozen=True, slots=True)
class Known:
    """A name of the closed list.

    Attributes:
        call: Makes the value from the arguments of a call; `None` if the name may not be called.
        build: Takes the value and the attributes that follow it, and returns the finished value;
            `None` if none may follow.
        value: What the name alone stands for, where it is never called (a dtype).
    """

    call: Callable[..., Any] | None = None
    build: Callable[[Any, Any], Any] | None = None
    value: Any = None


@dataclass(frozen=True, slots=True)
class Name:
    """A name that a pickle puts on its stack."""

    text: str
    known: Known


#: The names that a caller allows, each as `module.name`.
Names = Mapping[str, Known]


def read_pickle(
    data: bytes | memoryview,
    names: Names,
    *,
    where: Path | str,
    persistent: Callable[[Any], Any] | None = None,
) -> tuple[Any, int]:
    """Read one pickle.

    Args:
        data: Bytes that begin with the pickle.
        names: The closed list.
        where: The file, for messages.
        persistent: Returns the value for a persistent id; without it there may be none.

    Returns:
        The value, and the length of the pickle in bytes: more bytes may follow it.

    Raises:
        UnsupportedValue: It names something that is not on the list, or calls something that may
            not be called. Nothing was run.
        InvalidInput: It is damaged, or has an opcode that none of these files needs.
    """
    reader = _Reader(memoryview(data), names, str(where), persistent)
    try:
        return reader.run()
    except RegistryError:
        raise
    except (IndexError, struct.error, UnicodeDecodeError) as error:
        raise _damaged(reader, "it ends or breaks off in a wrong place", error) from error
    except (TypeError, ValueError, AttributeError, KeyError, OverflowError) as error:
        raise _damaged(reader, "its values do not fit each other", error) from error


class _Mark:
    """Begins a list of values on the stack."""


_MARK: Final = _Mark()


@dataclass(slots=True)
class _Reader:
    """The state of one reading.

    Attributes:
        data: The bytes.
        at: Position of the next byte.
        stack: Values that no other value holds yet.
        memo: Values that are used again.
        made: Of values that a name made: the value, the name, and where the value is in the memo.
    """

    data: memoryview
    names: Names
    where: str
    persistent: Callable[[Any], Any] | None
    at: int = 0
    stack: list[Any] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)
    made: dict[int, tuple[Any, Name, list[int]]] = field(default_factory=dict)

    def run(self) -> tuple[Any, int]:
        """Follow the opcodes to the end."""
        if self.data[0] != 0x80:
            raise _damaged(self, "it is older than protocol 2, or no pickle", self.data[0])
        while True:
            opcode = self.data[self.at]
            self.at += 1
            if opcode == _STOP:
                break
            step = _STEPS.get(opcode)
            if step is None:
                raise _damaged(self, "an opcode that is not read", f"{opcode:#04x}")
            step(self)
            if len(self.stack) > MAX_VALUES:
                raise _damaged(self, "too many values", len(self.stack))
        (value,) = self.stack
        return value.known.value if isinstance(value, Name) else value, self.at

    # Bytes

    def take(self, count: int) -> memoryview:
        """Return the next bytes."""
        if count > len(self.data) - self.at:
            raise IndexError(f"{count} bytes from {self.at} of {len(self.data)}")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, form: str) -> Any:
        """Return the next little-endian number."""
        (value,) = struct.unpack(form, self.take(struct.calcsize(form)))
        return value

    def line(self) -> str:
        """Return the next line."""
        end = self.at
        while self.data[end] != 0x0A:
            end += 1
        text = bytes(self.take(end - self.at)).decode()
        self.at += 1
        return text

    # The stack

    def push(self, value: Any) -> None:
        """Put a value on the stack."""
        self.stack.append(value)

    def pop(self) -> Any:
        """Take a value from the stack."""
        value = self.stack.pop()
        if value is _MARK:
            raise ValueError("a mark stands where a value is expected")
        return value.known.value if isinstance(value, Name) else value

    def since_mark(self) -> list[Any]:
        """Take all values from the stack down to the last mark, and the mark."""
        first = len(self.stack)
        while self.stack[first - 1] is not _MARK:
            first -= 1
            if not first:
                raise ValueError("a mark is missing")
        values = [v.known.value if isinstance(v, Name) else v for v in self.stack[first:]]
        del self.stack[first - 1 :]
        return values

    def top(self, *kinds: type) -> Any:
        """Return the value on top of the stack, which must be of one of these types."""
        if not isinstance(self.stack[-1], kinds):
            raise TypeError(f"{kinds[0].__name__} expected, {type(self.stack[-1]).__name__} found")
        return self.stack[-1]

    def keep(self, key: int) -> None:
        """Put the value on top of the stack into the memo."""
        value = self.memo[key] = self.stack[-1]
        if id(value) in self.made:
            self.made[id(value)][2].append(key)

    # Names

    def name(self, module: object, name: object) -> None:
        """Put a name of the closed list on the stack."""
        text = f"{module}.{name}"
        known = self.names.get(text)
        if known is None:
            raise UnsupportedValue(
                f"the file names {text[:200]}, which a load would look up and call",
                where=self.where,
                expected="tensors and plain values",
                hint=_HINT,
            )
        self.push(Name(text, known))

    def call(self) -> None:
        """Make a value by a name and its arguments."""
        arguments = self.pop()
        name = self.stack.pop()
        if not isinstance(name, Name) or name.known.call is None or type(arguments) is not tuple:
            what = name.text if isinstance(name, Name) else type(name).__name__
            raise UnsupportedValue(
                f"the file calls {what[:200]}",
                where=self.where,
                expected="calls that make tensors and plain values",
                hint=_HINT,
            )
        value = name.known.call(*arguments)
        self.push(value)
        if name.known.build is not None:
            self.made[id(value)] = (value, name, [])  # held, so that no other value gets its id

    def build(self) -> None:
        """Finish the value on top of the stack by the attributes that follow it."""
        attributes = self.pop()
        value = self.pop()
        _, name, keys = self.made.get(id(value), (None, None, ()))
        if name is None or name.known.build is None:
            raise UnsupportedValue(
                f"the file sets attributes of {type(value).__name__}",
                where=self.where,
                expected="tensors and plain values",
                hint=_HINT,
            )
        finished = name.known.build(value, attributes)
        self.push(finished)
        if finished is not value:
            for key in keys:
                if self.memo[key] is value:
                    self.memo[key] = finished


def _damaged(reader: _Reader, fault: str, found: object) -> InvalidInput:
    return InvalidInput(
        f"not a sound pickle: {fault}",
        where=f"{reader.where}, byte {reader.at}",
        expected="a pickle of tensors and plain values",
        found=str(found)[:200],
    )


# Opcodes


def _ignore(count: int) -> Callable[[_Reader], None]:
    def step(reader: _Reader) -> None:
        reader.take(count)

    return step


def _constant(value: Any) -> Callable[[_Reader], None]:
    def step(reader: _Reader) -> None:
        reader.push(value)

    return step


def _number(form: str) -> Callable[[_Reader], None]:
    def step(reader: _Reader) -> None:
        reader.push(reader.number(form))

    return step


def _long(form: str) -> Callable[[_Reader], None]:
    def step(reader: _Reader) -> None:
        length = reader.number(form)
        reader.push(int.from_bytes(reader.take(length), "little", signed=True))

    return step


def _text(form: str, decode: Callable[[memoryview], Any]) -> Callable[[_Reader], None]:
    def step(reader: _Reader) -> None:
        reader.push(decode(reader.take(reader.number(form))))

    return step


def _unicode(data: memoryview) -> str:
    return str(data, "utf-8", "surrogatepass")


def _python2_text(data: memoryview) -> str:
    return str(data, "utf-8")


def _tuple_of(count: int) -> Callable[[_Reader], None]:
    def step(reader: _Reader) -> None:
        values = [reader.pop() for _ in range(count)]
        reader.push(tuple(reversed(values)))

    return step


def _collected(kind: Callable[[list[Any]], Any]) -> Callable[[_Reader], None]:
    def step(reader: _Reader) -> None:
        reader.push(kind(reader.since_mark()))

    return step


def ordered_dict(pairs: Any = ()) -> OrderedDict[Any, Any]:
    """Return an OrderedDict of pairs, as a call of its name makes it."""
    return OrderedDict((check_key(key), value) for key, value in pairs)


def set_of(items: Any = ()) -> set[Any]:
    """Return a set, as a call of its name makes it."""
    return set(map(check_key, items))


def check_key(key: Any, depth: int = _MAX_KEY_DEPTH) -> Any:
    """Return a key of a dict, or an item of a set, if hashing it is safe.

    Raises:
        TypeError: It is of another type, or nested too deeply.
    """
    if type(key) in _PLAIN_KEYS:
        return key
    if type(key) is not tuple or not depth:
        raise TypeError(f"{type(key).__name__} as a key, or tuples that are nested too deeply")
    for part in key:
        check_key(part, depth - 1)
    return key


def _pairs(values: list[Any]) -> dict[Any, Any]:
    return dict(zip(map(check_key, values[::2]), values[1::2], strict=True))


def _set_of(kind: type) -> Callable[[list[Any]], Any]:
    return lambda values: kind(map(check_key, values))


def _pop(reader: _Reader) -> None:
    reader.stack.pop()


def _pop_mark(reader: _Reader) -> None:
    reader.since_mark()


def _duplicate(reader: _Reader) -> None:
    reader.push(reader.stack[-1])


def _append(reader: _Reader) -> None:
    value = reader.pop()
    reader.top(list, deque).append(value)


def _appends(reader: _Reader) -> None:
    values = reader.since_mark()
    reader.top(list, deque).extend(values)


def _set_item(reader: _Reader) -> None:
    value, key = reader.pop(), reader.pop()
    reader.top(dict)[check_key(key)] = value


def _set_items(reader: _Reader) -> None:
    pairs = _pairs(reader.since_mark())
    reader.top(dict).update(pairs)


def _add_items(reader: _Reader) -> None:
    values = reader.since_mark()
    reader.top(set).update(map(check_key, values))


def _memoize(reader: _Reader) -> None:
    reader.keep(len(reader.memo))


def _put(form: str) -> Callable[[_Reader], None]:
    def step(reader: _Reader) -> None:
        reader.keep(reader.number(form))

    return step


def _get(form: str) -> Callable[[_Reader], None]:
    def step(reader: _Reader) -> None:
        reader.push(reader.memo[reader.number(form)])

    return step


def _global(reader: _Reader) -> None:
    module = reader.line()
    reader.name(module, reader.line())


def _stack_global(reader: _Reader) -> None:
    name, module = reader.pop(), reader.pop()
    reader.name(module, name)


def _persistent(reader: _Reader) -> None:
    key = reader.pop()
    if reader.persistent is None:
        raise _damaged(reader, "a persistent id", type(key).__name__)
    reader.push(reader.persistent(key))


_STOP: Final = 0x2E
_STEPS: Final[Mapping[int, Callable[[_Reader], None]]] = {
    0x80: _ignore(1),  # PROTO
    0x95: _ignore(8),  # FRAME
    0x28: _constant(_MARK),
    0x30: _pop,
    0x31: _pop_mark,
    0x32: _duplicate,
    0x4E: _constant(None),
    0x88: _constant(True),
    0x89: _constant(False),
    0x4A: _number("<i"),
    0x4B: _number("<B"),
    0x4D: _number("<H"),
    0x8A: _long("<B"),
    0x8B: _long("<I"),
    0x47: _number(">d"),
    0x58: _text("<I", _unicode),
    0x8C: _text("<B", _unicode),
    0x8D: _text("<Q", _unicode),
    0x54: _text("<I", _python2_text),
    0x55: _text("<B", _python2_text),
    0x42: _text("<I", bytes),
    0x43: _text("<B", bytes),
    0x8E: _text("<Q", bytes),
    0x96: _text("<Q", bytearray),
    0x5D: lambda reader: reader.push([]),
    0x7D: lambda reader: reader.push({}),
    0x8F: lambda reader: reader.push(set()),
    0x29: _constant(()),
    0x74: _collected(tuple),
    0x85: _tuple_of(1),
    0x86: _tuple_of(2),
    0x87: _tuple_of(3),
    0x6C: _collected(list),
    0x64: _collected(_pairs),
    0x91: _collected(_set_of(frozenset)),
    0x61: _append,
    0x65: _appends,
    0x73: _set_item,
    0x75: _set_items,
    0x90: _add_items,
    0x94: _memoize,
    0x71: _put("<B"),
    0x72: _put("<I"),
    0x68: _get("<B"),
    0x6A: _get("<I"),
    0x63: _global,
    0x93: _stack_global,
    0x52: lambda reader: reader.call(),
    0x81: lambda reader: reader.call(),  # NEWOBJ: a class and its arguments
    0x62: lambda reader: reader.build(),
    0x51: _persistent,
}
