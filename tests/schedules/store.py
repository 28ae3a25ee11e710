"""The store between the actors: one memory backend, whose every call is one step of a schedule.

A call is a `Request`, what it returns an answer that can be compared and kept. Deletes may land
when they are asked for, later, or twice: those under way are kept here until they are delivered.
On a disk a put is two calls, the name and the sync of its folder; until the second a loss of power
takes the name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from holdfast.backends import ObjectNotFound
from holdfast.backends.base import Backend, Body, ByteRange, ObjectInfo, as_buffers, check_into
from holdfast.backends.memory import MemoryBackend

Method = Literal["get", "put", "put_if_absent", "stat", "list", "delete", "sync", "ready"]
#: When a delete lands: at once; at any later step; at once, and at any later step again.
Fate = Literal["now", "late", "twice"]


@dataclass(frozen=True, slots=True)
class Request:
    """One call of an actor to the store, or its word that it is `ready` for the schedule."""

    method: Method
    key: str = ""
    body: bytes | None = None
    byte_range: ByteRange | None = None
    start_after: str = ""
    limit: int | None = None
    delimiter: bool = False

    def __str__(self) -> str:
        return f"{self.method} {self.key}"


class Absent:
    """The answer that there is no such object."""


ABSENT = Absent()
Answer = bytes | bool | None | ObjectInfo | tuple[ObjectInfo, ...] | Absent


class World:
    """The objects at one moment of a schedule, and the deletes that are still under way.

    Attributes:
        objects: By key, as the memory backend keeps them.
        late: Keys of the deletes that were answered and may land yet, oldest first.
        mark: Equal for equal objects.
        unsynced: Keys that a loss of power takes; `None` on a store that has no such.
    """

    __slots__ = ("late", "mark", "objects", "unsynced")

    def __init__(
        self,
        objects: dict,
        late: tuple[str, ...] = (),
        mark: int = 0,
        unsynced: frozenset[str] | None = None,
    ) -> None:
        self.objects = objects
        self.late = late
        self.mark = mark
        self.unsynced = unsynced

    @classmethod
    def of(cls, backend: MemoryBackend) -> World:
        """Return what a backend holds."""
        return cls._of(dict(backend._store.objects))

    @classmethod
    def _of(cls, objects: dict) -> World:
        world = cls(objects)
        for item in objects.items():
            world.mark ^= hash(item)
        return world

    def copy(self) -> World:
        """Return another world that begins as this one."""
        return World(self.objects.copy(), self.late, self.mark, self.unsynced)

    def after_power_loss(self) -> World:
        """Return what is left when the power goes now."""
        lost = self.unsynced
        if not lost:
            return self
        return self._of({key: found for key, found in self.objects.items() if key not in lost})

    @property
    def state(self) -> tuple[int, tuple[str, ...]]:
        """Equal for worlds in which everything goes on alike."""
        return self.mark, self.late

    def carry_out(self, request: Request, fate: Fate = "now") -> Answer:
        """Do what a call asks for; return its answer."""
        if request.method == "delete" and fate != "now":
            if request.key not in self.late:
                self.late = (*self.late, request.key)
            if fate == "late":
                return None
        return self._do(request)

    def deliver(self, key: str) -> None:
        """Let a delete land that is under way."""
        self.late = tuple(one for one in self.late if one != key)
        self._do(Request("delete", key))

    def backend(self) -> MemoryBackend:
        """Return a backend over these objects."""
        backend = MemoryBackend()
        backend._store.objects = self.objects
        return backend

    def _do(self, request: Request) -> Answer:
        key, backend = request.key, self.backend()
        match request.method:
            case "get":
                try:
                    return backend.get(key, request.byte_range)
                except ObjectNotFound:
                    return ABSENT
            case "stat":
                try:
                    return backend.stat(key)
                except ObjectNotFound:
                    return ABSENT
            case "list":
                after, limit, folded = request.start_after, request.limit, request.delimiter
                return tuple(backend.list(key, start_after=after, limit=limit, delimiter=folded))
            case "ready":
                return None
            case "sync":
                self._set_unsynced({one for one in self.unsynced or () if _folder(one) != key})
                return None
        before = self.objects.get(key)
        assert request.method == "delete" or request.body is not None
        answer = (
            backend.delete(key)
            if request.method == "delete"
            else getattr(backend, request.method)(key, request.body)
        )
        now = self.objects.get(key)
        if now is not before:
            self.mark ^= hash((key, now)) if now is not None else 0
            self.mark ^= hash((key, before)) if before is not None else 0
            if self.unsynced is not None:
                self._set_unsynced({key, *self.unsynced} if now else {*self.unsynced} - {key})
        return answer

    def _set_unsynced(self, keys: set[str]) -> None:
        self.mark ^= hash(self.unsynced or None)
        self.unsynced = frozenset(keys)
        self.mark ^= hash(self.unsynced or None)


def _folder(key: str) -> str:
    return key.rpartition("/")[0]


class Asking(Backend):
    """A store that hands every call to a function: what an actor sees of the world.

    Args:
        name: Of the registry, for messages.
        page: Entries of one page of a listing, each page a call of its own; `None` for whole ones.
        is_disk: Whether a name is durable only once its folder is synced.
    """

    def __init__(
        self, name: str = "schedule", page: int | None = None, *, is_disk: bool = False
    ) -> None:
        self._name = name
        self._page = page
        self._is_disk = is_disk

    def ask(self, request: Request) -> Answer:
        """Return the answer to a call."""
        raise NotImplementedError

    @property
    def url(self) -> str:
        return f"memory://{self._name}"

    def get(
        self,
        key: str,
        byte_range: ByteRange | None = None,
        *,
        into: Sequence[memoryview] | None = None,
    ) -> bytes:
        check_into(byte_range, into)
        data = self._found(Request("get", key, byte_range=byte_range))
        assert isinstance(data, bytes)
        if into is None:
            return data
        start = 0
        for view in into:
            view[:] = data[start : start + len(view)]
            start += len(view)
        return b""

    def put(self, key: str, body: Body) -> None:
        self.ask(Request("put", key, b"".join(as_buffers(body))))
        self.make_durable([key])

    def put_if_absent(self, key: str, body: Body) -> bool:
        created = self.ask(Request("put_if_absent", key, b"".join(as_buffers(body))))
        self.make_durable([key])
        return bool(created)

    def make_durable(self, keys: Iterable[str]) -> None:
        if self._is_disk:
            for folder in dict.fromkeys(map(_folder, keys)):
                self.ask(Request("sync", folder))

    def stat(self, key: str) -> ObjectInfo:
        found = self._found(Request("stat", key))
        assert isinstance(found, ObjectInfo)
        return found

    def list(
        self,
        prefix: str = "",
        *,
        start_after: str = "",
        limit: int | None = None,
        delimiter: bool = False,
    ) -> Iterator[ObjectInfo]:
        left = limit
        while left is None or left > 0:
            most = min(n for n in (left, self._page, 10**9) if n is not None)
            page = self.ask(Request("list", prefix, None, None, start_after, most, delimiter))
            assert isinstance(page, tuple)
            yield from page
            if len(page) < most:
                return
            start_after = page[-1].key
            left = None if left is None else left - len(page)

    def delete(self, key: str) -> None:
        self.ask(Request("delete", key))

    def close(self) -> None:
        """Do nothing."""

    def _found(self, request: Request) -> Answer:
        answer = self.ask(request)
        if isinstance(answer, Absent):
            raise ObjectNotFound("no such object", where=request.key)
        return answer
