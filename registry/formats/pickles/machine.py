"""The state of one reading of a pickle: its bytes, stack and memo, and the names it may use."""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from holdfast.registry.errors import InvalidInput, UnsupportedValue
from holdfast.registry.formats.source import KEEP
from holdfast.registry.values import MOST_EQUAL, Budget, KeyHashes

#: How deeply tuples may be nested in a key. Python hashes nested tuples by recursion in C, which
#: has no limit: a deep one would overflow the stack and kill the process.
_MAX_KEY_DEPTH: Final = 8
_PLAIN_KEYS: Final = (str, int, float, bool, bytes, complex, type(None))
#: Bytes of memory for an entry of a dict or set, for a part of a key, and for counting hashes.
_ENTRY_BYTES: Final = 100
_HASHES_BYTES: Final = 400


class Keys:
    """Admits the keys of all dicts and the items of all sets of one reading."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        #: Containers by `id`, held so that no other gets it, each with the hashes of its keys.
        self._hashes: dict[int, tuple[Any, KeyHashes]] = {}

    def admit(self, keys: Sequence[Any], target: Any = None) -> Sequence[Any]:
        """Return keys that may be added to a container; to a new one without it."""
        self.budget.take(len(keys) * _ENTRY_BYTES)
        hashes: KeyHashes | None = None
        for key in keys:
            if type(key) is str:
                continue
            self.check(key)
            hashes = hashes or self._hashes_of(target)
            if not hashes.admits(key):
                raise ValueError(f"more than {MOST_EQUAL} keys with the same hash")
        return keys

    def check(self, key: Any, depth: int = _MAX_KEY_DEPTH) -> None:
        """Check that hashing a key is safe, and count how long it takes."""
        if type(key) is int:
            self.budget.take(key.bit_length() >> 3)  # Python computes it each time
        elif type(key) is tuple and depth:
            self.budget.take(len(key) * _ENTRY_BYTES)
            for part in key:
                self.check(part, depth - 1)
        elif type(key) not in _PLAIN_KEYS:
            raise TypeError(f"{type(key).__name__} as a key, or tuples that are nested too deeply")

    def _hashes_of(self, target: Any) -> KeyHashes:
        if target is None:
            return KeyHashes()
        if id(target) not in self._hashes:
            self.budget.take(_HASHES_BYTES)
            self._hashes[id(target)] = (target, KeyHashes())
        return self._hashes[id(target)][1]

    def ordered_dict(self, pairs: Any = ()) -> OrderedDict[Any, Any]:
        """Return an OrderedDict of pairs, as a call of its name makes it."""
        found = [(key, value) for key, value in pairs]
        self.admit([key for key, _ in found])
        return OrderedDict(found)

    def set_of(self, items: Any = ()) -> set[Any]:
        """Return a set, as a call of its name makes it."""
        return set(self.admit(list(items)))


_HINT: Final = (
    "Nothing in it was run. Save state dicts and plain values only, or call run.save() in the "
    f"program that has the objects. {KEEP}"
)


@dataclass(frozen=True, slots=True)
class Known:
    """A name of the closed list."""

    #: Makes the value from the arguments of a call; `None` if the name may not be called.
    call: Callable[..., Any] | None = None
    #: Takes the value and the attributes that follow it, and returns the finished value; `None` if
    #: none may follow.
    build: Callable[[Any, Any], Any] | None = None
    value: Any = None  # value of the bare name, if it is never called (a dtype)
    size_bytes: int = 500  # memory for the result of a call, without copied bytes


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
    """The state of one reading."""

    data: memoryview
    names: Names
    where: str
    persistent: Callable[[Any], Any] | None
    keys: Keys  # admits keys, and has the budget of the reading
    at: int = 0  # position of the next byte
    stack: list[Any] = field(default_factory=list)  # values that no other value holds yet
    memo: dict[int, Any] = field(default_factory=dict)  # values that are used again
    #: Of values that a name made: the value, the name, and where the value is in the memo.
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
        try:
            known = self.names[text]
        except KeyError as error:
            raise UnsupportedValue(
                f"the file names {text[:200]}, which a load would look up and call",
                where=self.where,
                expected="tensors and plain values",
                hint=_HINT,
            ) from error
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
