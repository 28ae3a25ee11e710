"""The memory of this process, as Linux counts it."""

from __future__ import annotations

import ctypes
from pathlib import Path


def resident() -> int:
    """Return how much memory is resident now, in bytes."""
    return _status_bytes("VmRSS")


def peak() -> int:
    """Return how much memory was resident at most, in bytes, since the program began.

    `getrusage` would answer with the peak of the program that started this one, if that is higher.
    """
    return _status_bytes("VmHWM")


def begin_peak(*, trim: bool) -> int:
    """Begin a new peak, and return how much memory is resident now, in bytes.

    Args:
        trim: Whether to return free memory to the system first. It would hide what is used, but to
            get it again takes time.
    """
    if trim:
        ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return resident()


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(one.split()[1]) * 1024 for one in lines if one.startswith(f"{name}:"))
