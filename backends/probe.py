"""Probe a store's exclusive create with races before it gets any data.

A probe finds broken promises; it cannot prove that there are none. A store that lets two writers
win once in a thousand races often passes, and a store may fail only between two regions.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from holdfast.backends.base import Backend
from holdfast.backends.errors import ObjectNotFound, StorageError, StoreUnsuitable

# Long enough that writers overlap on the store, and short enough to cost nothing.
_BODY_BYTES = 4096


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """The size of a probe that passed.

    Attributes:
        rounds: Number of keys.
        writers: Number of writers that raced for each key.
    """

    rounds: int
    writers: int


def probe_put_if_absent(
    backend: Backend, prefix: str, *, writers: int = 8, rounds: int = 10
) -> ProbeReport:
    """Let several writers race to create the same keys, and check the answers and the objects.

    For each of `rounds` new keys, the store must tell exactly one writer that it created the
    object, hold the bytes of that writer, list the object at once, and refuse a later create. All
    objects are deleted at the end, even after an error.

    Args:
        backend: The store, without a wrapper that repeats calls: a repeated create would refuse
            its own object.
        prefix: A new prefix without a slash at its end, such as `.probe/<random>`.
        writers: Number of threads for each key.
        rounds: Number of keys.

    Raises:
        StoreUnsuitable: The store broke a promise; the counts are in the message.
    """
    keys = [f"{prefix}/{number:04d}" for number in range(rounds)]
    try:
        with ThreadPoolExecutor(writers) as pool:
            findings = [_race(backend, pool, writers, key) for key in keys]
        findings.append(_check_listing(backend, prefix, keys))
        _refuse(backend, [finding for finding in findings if finding], rounds, writers)
        return ProbeReport(rounds, writers)
    finally:
        for key in keys:
            # The first error is raised already, and leftovers under a scratch prefix are harmless.
            with suppress(StorageError):
                backend.delete(key)


def _race(backend: Backend, pool: ThreadPoolExecutor, writers: int, key: str) -> str:
    """Race for one key; return the broken promise, or ""."""
    barrier = threading.Barrier(writers)
    answers = list(pool.map(lambda number: _write(backend, barrier, key, number), range(writers)))
    winners = [number for number, created in enumerate(answers) if created]
    if len(winners) != 1:
        return f"{len(winners)} writers created one key"
    if _read(backend, key) != _body(winners[0]):
        return "the object does not hold the bytes of its creator"
    if backend.put_if_absent(key, b"later"):
        return "a second create of an existing key was accepted"
    if _read(backend, key) != _body(winners[0]):
        return "a refused create changed the object"
    return ""


def _write(backend: Backend, barrier: threading.Barrier, key: str, number: int) -> bool:
    barrier.wait(60)
    return backend.put_if_absent(key, _body(number))


def _body(number: int) -> bytes:
    return bytes([number % 256]) * _BODY_BYTES


def _read(backend: Backend, key: str) -> bytes | None:
    try:
        return backend.get(key)
    except ObjectNotFound:
        return None


def _check_listing(backend: Backend, prefix: str, keys: list[str]) -> str:
    listed = [info.key for info in backend.list(f"{prefix}/")]
    return "" if listed == keys else f"{len(keys)} objects were written, {len(listed)} are listed"


def _refuse(backend: Backend, findings: list[str], rounds: int, writers: int) -> None:
    if not findings:
        return
    counts = {text: findings.count(text) for text in findings}
    raise StoreUnsuitable(
        "the store does not create objects exclusively",
        where=backend.url,
        expected=f"one winner at each of {rounds} keys with {writers} writers",
        found="; ".join(f"{text} ({count} times)" for text, count in counts.items()),
        hint="Use a store that honours `If-None-Match: *`, or a local file system.",
    )
