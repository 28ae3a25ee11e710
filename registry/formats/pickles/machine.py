"""The state of one reading of a pickle: its bytes, stack and memo, and the names it may use."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from holdfast.registry.errors import InvalidInput, UnsupportedValue
from holdfast.registry.formats.pickles.containers import Keys
from holdfast.registry.formats.source import KEEP

_HINT: Final = (
    "Nothing in it was run. Save state dicts and plain values only, or call run.save() in the "
    f"program that has the objects. {KEEP}"
)


@dataclass(frozen=True, slots=True)
class Known:
    """A name of the closed list.

    Attributes:
        call: Makes the value from the arguments of a call; `None` if the name may not be called.
        build: Takes the value and the attributes that follow it, and returns the finished value;
            `None` if none may follow.
        value: What the name alone stands for, where it is never called (a dtype).
        size_bytes: Memory for the value that a call makes, besides what it copies.
    """

    call: Callable[..., Any] | None = None
    build: Callable[[Any, Any], Any] | None = None
    value: Any = None
    size_bytes: int = 500


@dataclass(frozen=True, slots=True)
class Name:
    """A name that a pickle puts on its stack."""

    text: str
    known: Known


#: The names that a caller allows, each as `module.name`.
Names = Mapping[str, Known]


class Mark:
    """Begins a list of values on the stack."""


MARK: Final = Mark()


@dataclass(slots=True)
class Machine:
    """The state of one reading.

    Attributes:
        data: The bytes.
        keys: Admits keys, and has the budget of the reading.
        at: Position of the next byte.
        stack: Values that no other value holds yet.
        memo: Values that are used again.
        made: Of values that a name made: the value, the name, and where the value is in the memo.
    """

    data: memoryview
    names: Names
    where: str
    persistent: Callable[[Any], Any] | None
    keys: Keys
    at: int = 0
    stack: list[Any] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)
    made: dict[int, tuple[Any, Name, list[int]]] = field(default_factory=dict)

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
        if value is MARK:
            raise ValueError("a mark stands where a value is expected")
        return value.known.value if isinstance(value, Name) else value

    def since_mark(self) -> list[Any]:
        """Take all values from the stack down to the last mark, and the mark."""
        first = len(self.stack)
        while self.stack[first - 1] is not MARK:
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
        self.keys.budget.take(name.known.size_bytes)
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


def damaged(machine: Machine, fault: str, found: object) -> InvalidInput:
    """Return the error for a pickle that breaks a rule."""
    return InvalidInput(
        f"not a sound pickle: {fault}",
        where=f"{machine.where}, byte {machine.at}",
        expected="a pickle of tensors and plain values",
        found=str(found)[:200],
    )
