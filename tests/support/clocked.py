"""A store whose clock a test sets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from holdfast.backends import Backend, ObjectInfo
from holdfast.backends.wrappers import Wrapper
from holdfast.registry.errors import AccessDenied


class Clocked(Wrapper):
    """A store with a clock of its own, which may deny the files by which it tells the time."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.ahead_s, self.put_s, self.denies = 0.0, dict[str, float](), False

    def put(self, key: str, data: Any) -> None:
        """Put an object now, by this clock."""
        if self.denies and key.startswith(".probe/"):
            raise AccessDenied("access is denied", where=key)
        super().put(key, data)
        self.put_s[key] = self.ahead_s

    def put_if_absent(self, key: str, data: Any) -> bool:
        """Create an object now, by this clock."""
        is_ours = super().put_if_absent(key, data)
        if is_ours:
            self.put_s[key] = self.ahead_s
        return is_ours

    def _seen(self, info: ObjectInfo) -> ObjectInfo:
        return info._replace(modified_s=1e9 + self.put_s.get(info.key, 0.0))

    def list(self, *given: Any, **options: Any) -> Iterator[ObjectInfo]:
        """List objects with their times by this clock."""
        return map(self._seen, super().list(*given, **options))

    def stat(self, key: str) -> ObjectInfo:
        """Describe an object with its time by this clock."""
        return self._seen(super().stat(key))
