"""What is between the actors: one memory backend, whose every call is one step of a schedule.

A call is a `Request`, what it returns an answer that can be compared and kept. Deletes may land
when they are asked for, later, or twice: those under way are kept here until they are delivered.
On a disk a put is two calls, the name and the sync of its folder; until the second a loss of power
takes the name.

Actors that are ranks of one job talk to each other here, too (`tests.schedules.ranks`). A call that
waits for another rank is carried out when that has spoken, or when its deadline has passed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from holdfast.backends import ObjectNotFound
from holdfast.backends.base import Backend, Body, ByteRange, ObjectInfo, as_buffers, check_into
from holdfast.backends.memory import MemoryBackend

Method = Literal["get", "put", "put_if_absent", "stat", "list", "delete", "sync", "ready"]
#: Between ranks: a message is sent, waited for, dropped; bytes are offered to others, and theirs
#: waited for; connections are ended.
Talk = Literal["send", "receive", "forget", "offer", "collect", "break"]
_TALK = get_args(Talk)
#: When a delete lands: at once; at any later step; at once, and at any later step again.
Fate = Literal["now", "late", "twice"]


#: Bytes from or for each rank.
Pieces = tuple[tuple[int, bytes], ...]


@dataclass(frozen=True, slots=True)
class Request:
    """One call of an actor, or its word that it is `ready` for the schedule.

    Attributes:
        rank: The rank that talks.
        others: The ranks that it waits for.
        pieces: The bytes that it offers, with the rank for each.
        timeout_s: How long it waits.
    """

    method: Method | Talk
    key: str = ""
    body: bytes | None = None
    byte_range: ByteRange | None = None
    start_after: str = ""
    limit: int | None = None
    delimiter: bool = False
    rank: int = -1
    others: tuple[int, ...] = ()
    pieces: Pieces = ()
    timeout_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.method} {self.key}"


class Absent:
    """The answer that there is no such object."""


ABSENT = Absent()
Answer = bytes | bool | None | ObjectInfo | tuple[ObjectInfo, ...] | Pieces | Absent


class World:
    """The objects at one moment of a schedule, and the deletes that are still under way.

    Attributes:
        objects: By key, as the memory backend keeps them.
        late: Keys of the deletes that were answered and may land yet, oldest first.
        mark: Equal for equal objects.
        unsynced: Keys that a loss of power takes; `None` on a store that has no such.
        said: What ranks have said, by the kind, the name and the rank.
        said_mark: Equal where that is equal.
        overdue: The ranks for which another one has waited in vain.
    """

    __slots__ = ("late", "mark", "objects", "overdue", "said", "said_mark", "unsynced")

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
        self.said: dict[tuple[str, str, int], bytes | Pieces] = {}
        self.said_mark = 0
        self.overdue: frozenset[int] = frozenset()

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
        made = World(self.objects.copy(), self.late, self.mark, self.unsynced)
        made.said, made.said_mark = self.said.copy(), self.said_mark
        made.overdue = self.overdue
        return made

    def after_power_loss(self) -> World:
        """Return what is left when the power goes now."""
        lost = self.unsynced
        if not lost:
            return self
        return self._of({key: found for key, found in self.objects.items() if key not in lost})

    @property
    def state(self) -> tuple[int, tuple[str, ...], int, frozenset[int]]:
        """Equal for worlds in which everything goes on alike."""
        return self.mark, self.late, self.said_mark, self.overdue

    def carry_out(self, request: Request, fate: Fate = "now") -> Answer:
        """Do what a call asks for; return its answer."""
        if request.method in _TALK:
            return self._talk(request)
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

    # Between ranks

    def lacking(self, request: Request) -> list[int]:
        """Return the ranks that a call waits for, and that have not spoken yet."""
        kind = {"receive": "send", "collect": "offer"}.get(request.method, "")
        if not request.timeout_s or self._is_broken(request):
            return []
        return [one for one in request.others if (kind, request.key, one) not in self.said]

    def _is_broken(self, request: Request) -> bool:
        links = request.key.partition("#")[0]
        return request.method == "collect" and ("break", links, -1) in self.said

    def _talk(self, request: Request) -> Answer:
        method, key = request.method, request.key
        match method:
            case "send":
                self._say((method, key, request.rank), request.body or b"")
            case "offer":
                self._say((method, key, request.rank), request.pieces)
            case "forget":
                self._say(("send", key, request.rank), None)
            case "break":
                self._say((method, key, -1), b"")
            case _:
                return self._heard(request)
        return None

    def _heard(self, request: Request) -> Answer:
        if lacking := self.lacking(request):
            self.overdue |= set(lacking)
            if request.method == "collect":
                self._say(("break", request.key.partition("#")[0], -1), b"")
        if self._is_broken(request):
            return ABSENT
        kind = {"receive": "send", "collect": "offer"}[request.method]
        found = [(one, self.said.get((kind, request.key, one))) for one in request.others]
        if kind == "send":
            return tuple((one, data) for one, data in found if isinstance(data, bytes))
        return tuple(
            (one, data) for one, some in found for to, data in some or () if to == request.rank
        )

    def _say(self, what: tuple[str, str, int], data: bytes | Pieces | None) -> None:
        before = self.said.pop(what, None)
        if before is not None:
            self.said_mark ^= hash((what, before))
        if data is not None:
            self.said[what] = data
            self.said_mark ^= hash((what, data))

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
