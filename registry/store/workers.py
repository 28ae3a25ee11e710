"""The bulk work of one call, cut into units: done by threads here, or by an executor's workers.

A unit is a value: keys, places, what is expected. The function that does it gets the stores and the
unit, and returns a small value. In another process it opens the stores by their addresses. Results
are taken in the order of the units, so the outcome is the same whoever did the work. A unit may be
done twice: it only reads, or puts objects that are named by their content.

Of the registry only what is no secret travels: URL, id, and plain options. A secret option is named
with the environment variable that holds it, and the worker reads it there. Specified in
docs/spec.md, section 44.
"""

from __future__ import annotations

import json
import math
import os
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    ThreadPoolExecutor,
    wait,
)
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import count
from typing import Any, Generic, Literal, TypeVar, cast

from holdfast.backends import parse
from holdfast.backends.location import redact
from holdfast.backends.opening import Transport
from holdfast.backends.secrets import may_be_secret
from holdfast.registry.errors import InvalidInput, RegistryError, WorkersFailed
from holdfast.registry.store.address import VARIABLE, Address, from_environment, merged
from holdfast.registry.store.connecting import open_store
from holdfast.registry.store.store import Store
from holdfast.registry.store.threads import abandon

#: The variables in which a worker looks for secret options.
_VARIABLES = (VARIABLE, "HOLDFAST_SRC_STORAGE_OPTIONS", "HOLDFAST_DST_STORAGE_OPTIONS")
#: Stores that a worker keeps open: those of a sync are two.
_KEPT_OPEN = 8
_ALTERNATIVE = "Open it by its URL, or call this without an executor."

#: The names that lead to an option.
_Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WorkerAddress:
    """The address of a registry, without secrets."""

    url: str  # its URL; of a folder the absolute path, which the workers share
    registry_id: str  # its id: a worker that finds another registry there refuses to work
    options: str  # storage options that are no secrets, as JSON
    #: For each secret option the environment variable that holds it, and its path there.
    secrets: tuple[tuple[str, _Path], ...]
    transport: Transport | None  # what moves the bytes of S3
    read_only: bool  # whether workers may only read

    @classmethod
    def of(cls, store: Store, *, read_only: bool) -> WorkerAddress:
        """Return the address of a store that workers may open, too."""
        address, where = store.address, store.backend.url
        if address is None or address.fs is not None:
            raise InvalidInput(
                "workers in other processes cannot open this registry",
                where=where,
                found="a file system object" if address else "a store object of this process",
                hint=_ALTERNATIVE,
            )
        location = parse(address.url)
        if location.scheme == "memory":
            raise InvalidInput(
                "workers in other processes cannot read the memory of this one",
                where=where,
                hint="Use a folder that they share, or a bucket; or call this without an executor.",
            )
        url = location.url if location.scheme == "file" else os.fspath(address.url)
        if redact(url) != url:
            raise InvalidInput(
                "the URL may hold a secret, which is not sent to workers",
                where=where,
                hint=f"Give it as an option in {VARIABLE}, here and in the workers' environment.",
            )
        plain, secrets = _parted(address.storage_options or {}, where)
        return cls(url, store.config.id, plain, secrets, address.transport, read_only)

    def opened(self) -> Store:
        """Return the store, opened once in this process."""
        return _opened(self)

    def _all_options(self) -> dict[str, Any] | None:
        options: dict[str, Any] = json.loads(self.options)
        for variable, path in self.secrets:
            value = _at(from_environment(variable), path)
            if value is None:
                raise InvalidInput(
                    "a worker lacks a secret option of the store",
                    where=f"process {os.getpid()}: {variable}",
                    expected=".".join(path),
                    hint="Set the variable in the environment of every worker.",
                )
            for name in reversed(path):
                value = {name: value}
            options = merged(options, value)
        return options or None


@lru_cache(_KEPT_OPEN)
def _opened(of: WorkerAddress) -> Store:
    address = Address(of.url, of._all_options(), None, of.transport)
    # Logs are compared with the heads that the caller's machine has seen.
    return open_store(address, read_only=of.read_only, expect_id=of.registry_id, remember=False)


def _parted(options: Mapping[str, Any], where: str) -> tuple[str, tuple[tuple[str, _Path], ...]]:
    """Return the options that may travel, and where the others are in the environment."""
    plain: dict[str, Any] = {}
    secrets: list[tuple[str, _Path]] = []
    for path, found in _leaves(options):
        if not _is_plain(found):
            raise InvalidInput(
                "a storage option cannot be sent to workers in other processes",
                where=f"{where}: {'.'.join(path)}",
                expected="a text, a number, or a list of them",
                found=type(found).__name__,
                hint=_ALTERNATIVE,
            )
        if any(map(may_be_secret, path)) and not isinstance(found, bool | None):
            secrets.append((_variable_with(path, found, where), path))
            continue
        value: Any = found
        for name in reversed(path):
            value = {name: value}
        plain = merged(plain, value)
    return json.dumps(plain, sort_keys=True), tuple(secrets)


def _variable_with(path: _Path, value: object, where: str) -> str:
    for variable in _VARIABLES:
        if _at(from_environment(variable), path) == value:
            return variable
    raise InvalidInput(
        "a storage option may be a secret, which is not sent to workers",
        where=f"{where}: {'.'.join(path)}",
        expected=f"the same option in {VARIABLE}",
        hint="Set that variable here and in the environment of every worker.",
    )


def _leaves(options: Mapping[str, Any], path: _Path = ()) -> Iterator[tuple[_Path, object]]:
    for name, value in options.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, (*path, str(name)))
        else:
            yield (*path, str(name)), value


def _is_plain(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or value == {} or isinstance(value, (str, int))


def _at(options: Mapping[str, Any], path: _Path) -> Any:
    found: Any = options
    for name in path:
        if not isinstance(found, Mapping) or name not in found:
            return None
        found = found[name]
    return found


#: Bytes of objects held in memory at once by threads here; a larger object is held alone.
BYTES_IN_FLIGHT = 256 * 2**20
#: Units begun at once by threads here.
_AT_ONCE = 32
#: Units that are sent to a worker together ...
_BATCH_UNITS = 128
#: ... and the bytes that they may move; a larger unit is sent alone.
_BATCH_BYTES = 64 * 2**20
#: Batches given to an executor at once: enough for some hundred workers.
_BATCHES_AT_ONCE = 256
#: Units here, or batches elsewhere, whose outcomes are not taken yet: they wait for an earlier one.
_HELD = 512

_T = TypeVar("_T")
_R = TypeVar("_R")


@dataclass(frozen=True, slots=True)
class Outcome(Generic[_R]):
    """The end of a unit: its value, or the error of ours that it raised."""

    value: _R | None = None
    error: RegistryError | None = None

    def result(self) -> _R:
        """Return the value, or raise the error."""
        if self.error is not None:
            raise self.error
        return cast("_R", self.value)


#: Takes a unit and its outcome, in the thread of the caller.
Take = Callable[[_T, Outcome[_R]], object]


def _no_bytes(_: object) -> int:
    return 0


class Workers:
    """The threads, or the workers of an executor, that do the bulk work of one call."""

    def __init__(self, executor: Executor | None, *stores: Store, writes: bool = False) -> None:
        if executor is not None and not isinstance(executor, Executor):
            raise InvalidInput(
                "not an executor",
                expected="a concurrent.futures.Executor",
                found=type(executor).__name__,
                hint="A client of Dask makes one: `client.get_executor()`.",
            )
        self._executor = executor
        self._stores = stores
        self._addresses: tuple[WorkerAddress, ...] = ()
        self.is_elsewhere = executor is not None and not isinstance(executor, ThreadPoolExecutor)
        if self.is_elsewhere:
            last = len(stores) - 1
            self._addresses = tuple(
                WorkerAddress.of(store, read_only=not (writes and number == last))
                for number, store in enumerate(stores)
            )

    def each(
        self,
        work: Callable[..., _R],
        units: Iterable[_T],
        take: Take[_T, _R],
        *,
        size_of: Callable[[_T], int] = _no_bytes,
        pool: Literal["bulk", "small"] = "bulk",
    ) -> None:
        """Do units of work in parallel, and take the outcomes in the order of the units.

        The next unit begins as soon as there is room for it, however slow an earlier one is. After
        an error no more units begin; those that threads here have begun are waited for.
        """
        begin = self._send(work) if self.is_elsewhere else self._start(work, pool)
        window = _Window(begin, take, self.is_elsewhere)
        try:
            for batch, size in self._batches(units, size_of):
                window.add(batch, size)
            window.finish()
        finally:
            window.end()

    def all(
        self,
        work: Callable[..., _R],
        units: Iterable[_T],
        *,
        size_of: Callable[[_T], int] = _no_bytes,
        pool: Literal["bulk", "small"] = "bulk",
    ) -> list[_R]:
        """Return the results of all units, in their order, or raise the first error."""
        found: list[_R] = []
        self.each(
            work,
            units,
            lambda _, outcome: found.append(outcome.result()),
            size_of=size_of,
            pool=pool,
        )
        return found

    def _batches(
        self, units: Iterable[_T], size_of: Callable[[_T], int]
    ) -> Iterator[tuple[list[tuple[_T, int]], int]]:
        most = _BATCH_UNITS if self.is_elsewhere else 1
        batch: list[tuple[_T, int]] = []
        held = 0
        for unit in units:
            size = size_of(unit)
            if batch and (len(batch) >= most or held + size > _BATCH_BYTES):
                yield batch, held
                batch, held = [], 0
            batch.append((unit, size))
            held += size
        if batch:
            yield batch, held

    def _start(self, work: Callable[..., _R], pool: str) -> _Begin[_T, _R]:
        """Return a function that gives a unit of work to threads of this process."""
        threads = self._executor
        if threads is None:
            pools = self._stores[-1].pools
            threads = pools.small if pool == "small" else pools.bulk

        def begin(batch: Sequence[tuple[_T, int]]) -> Future[list[Outcome[_R]]]:
            return threads.submit(_attempt, work, self._stores, batch)

        return begin

    def _send(self, work: Callable[..., _R]) -> _Begin[_T, _R]:
        """Return a function that gives a batch of units to the executor."""
        assert self._executor is not None
        submit = self._executor.submit
        # Dask would give two equal calls one result, even if the store has changed in between.
        nonce, numbers = secrets.token_hex(8), count()

        def begin(batch: Sequence[tuple[_T, int]]) -> Future[list[Outcome[_R]]]:
            sent = _Batch(self._addresses, work, tuple(batch), f"{nonce}-{next(numbers)}")
            return submit(_work_elsewhere, sent)

        return begin


_Begin = Callable[[Sequence[tuple[_T, int]]], "Future[list[Outcome[_R]]]"]


class _Window(Generic[_T, _R]):
    """The batches that were begun and whose outcomes are not taken yet."""

    def __init__(self, begin: _Begin[_T, _R], take: Take[_T, _R], is_elsewhere: bool) -> None:
        self._begin = begin
        self._take = take
        self._is_elsewhere = is_elsewhere
        self._most = _BATCHES_AT_ONCE if is_elsewhere else _AT_ONCE
        self._running: dict[Future[list[Outcome[_R]]], int] = {}
        self._held_bytes = 0
        self._waiting: deque[tuple[Sequence[tuple[_T, int]], Future[list[Outcome[_R]]]]] = deque()

    def add(self, batch: Sequence[tuple[_T, int]], size: int) -> None:
        while self._running and self._is_full(size):
            self._settle()
        future = self._guarded(partial(self._begin, batch))
        self._running[future] = size
        self._held_bytes += size
        self._waiting.append((batch, future))

    def finish(self) -> None:
        while self._running:
            self._settle()

    def end(self) -> None:
        """Give up what was not taken."""
        if not self._is_elsewhere:
            abandon(self._running)  # it uses the caller's memory
        for future in self._running:
            future.cancel()

    def _is_full(self, size: int) -> bool:
        # Elsewhere the bytes are in the memory of the workers.
        too_large = not self._is_elsewhere and self._held_bytes + size > BYTES_IN_FLIGHT
        return too_large or len(self._running) >= self._most or len(self._waiting) >= _HELD

    def _settle(self) -> None:
        """Wait until a batch ends; take the outcomes that no earlier unit holds back."""
        for future in wait(self._running, return_when=FIRST_COMPLETED).done:
            self._held_bytes -= self._running.pop(future)
        while self._waiting and self._waiting[0][1] not in self._running:
            batch, future = self._waiting.popleft()
            outcomes = self._guarded(future.result)
            for (unit, _), outcome in zip(batch, outcomes, strict=True):
                self._take(unit, outcome)

    def _guarded(self, call: Callable[[], Any]) -> Any:
        """Call something of the executor; make an error of ours of its failures."""
        if not self._is_elsewhere:
            return call()
        try:
            return call()
        except RegistryError:
            raise
        except (BrokenExecutor, CancelledError, ImportError) as error:
            raise _failed(error) from error
        except Exception as error:
            # Dask is not imported here: whoever made the executor has it.
            if type(error).__module__.partition(".")[0] == "distributed":
                raise _failed(error) from error
            raise


@dataclass(frozen=True, slots=True)
class _Batch:
    """A task as it is sent to a worker."""

    addresses: tuple[WorkerAddress, ...]  # where the stores are
    work: Callable[..., Any]  # the function that does a unit
    units: tuple[tuple[Any, int], ...]  # the units, each with its bytes
    name: str  # a text that no other batch has


def _work_elsewhere(batch: _Batch) -> list[Outcome[Any]]:
    """Do the units of a batch in the threads of this worker."""
    workers = Workers(None, *(address.opened() for address in batch.addresses))
    outcomes: list[Outcome[Any]] = []
    stores = len(batch.addresses)
    workers.each(
        lambda *given: batch.work(*given[:stores], given[stores][0]),
        batch.units,
        lambda _, outcome: outcomes.append(outcome),
        size_of=lambda unit: unit[1],
    )
    return outcomes


def _attempt(
    work: Callable[..., _R], stores: Sequence[Store], batch: Sequence[tuple[Any, int]]
) -> list[Outcome[_R]]:
    ((unit, _),) = batch
    try:
        return [Outcome(work(*stores, unit))]
    except RegistryError as error:
        return [Outcome(None, error)]


def _failed(error: Exception) -> WorkersFailed:
    return WorkersFailed(
        "the workers of the executor died, or cannot work",
        found=f"{type(error).__name__}: {error}",
        hint="Look at their logs: a worker may lack memory, or Holdfast. Then start again: what "
        "was copied is not copied again.",
    )
