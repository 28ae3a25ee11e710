"""What goes wrong with a store: a changed bit, and another who comes in at a call."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Sequence

from holdfast.backends import Backend, Body, ByteRange
from holdfast.backends.errors import StoreUnavailable
from holdfast.backends.wrappers import Wrapper


def flip(backend: Backend, key: str, bit: int = 100) -> None:
    """Invert one bit of an object, counted from its end where negative."""
    data = bytearray(backend.get(key))
    data[bit // 8] ^= 1 << bit % 8
    backend.put(key, bytes(data))


class Died(BaseException):
    """The process is no more: no code of it may catch this."""


class Hooked(Wrapper):
    """A store that calls `before(method, key)` and `after(method, key)` around what it does."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.before: Callable[[str, str], object] = lambda method, key: None
        self.after: Callable[[str, str], object] = lambda method, key: None

    def get(
        self,
        key: str,
        byte_range: ByteRange | None = None,
        *,
        into: Sequence[memoryview] | None = None,
    ) -> bytes:
        self.before("get", key)
        data = super().get(key, byte_range, into=into)
        self.after("get", key)
        return data

    def put(self, key: str, body: Body) -> None:
        self.before("put", key)
        super().put(key, body)
        self.after("put", key)

    def put_if_absent(self, key: str, body: Body) -> bool:
        self.before("put_if_absent", key)
        created = super().put_if_absent(key, body)
        self.after("put_if_absent", key)
        return created


class Once:
    """Does something at the first call that fits, and never again."""

    def __init__(self, prefix: str, action: Callable[[], object], method: str = "") -> None:
        self.prefix, self.action, self.method = prefix, action, method
        self.done = False

    def __call__(self, method: str, key: str) -> None:
        if not self.done and key.startswith(self.prefix) and method.startswith(self.method):
            self.done = True
            self.action()


class Forgetful(Wrapper):
    """A store that creates an object and says that it was there already: its answer was lost."""

    def put_if_absent(self, key: str, body: Body) -> bool:
        super().put_if_absent(key, body)
        return False


class Liar(Wrapper):
    """A store that says that an object is there already, whatever is there."""

    def put_if_absent(self, key: str, body: Body) -> bool:
        return False


class Unconditional(Wrapper):
    """A store that ignores `If-None-Match`."""

    def put_if_absent(self, key: str, body: Body) -> bool:
        self.put(key, body)
        return True


class Silent(Wrapper):
    """A store that creates no object under a prefix and gives no answer; it notes the keys."""

    def __init__(self, inner: Backend, prefix: str = "") -> None:
        super().__init__(inner)
        self._prefix = prefix
        self.asked: list[str] = []

    def put_if_absent(self, key: str, body: Body) -> bool:
        if not key.startswith(self._prefix):
            return super().put_if_absent(key, body)
        self.asked.append(key)
        raise StoreUnavailable("no answer", where=key)


class Gate(Wrapper):
    """Holds packs back until told; then fails, where told so."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.open = threading.Event()
        self.reached = threading.Event()
        self.error: BaseException | None = None

    def put_if_absent(self, key: str, body: Body) -> bool:
        if key.startswith("packs/"):
            self.reached.set()
            assert self.open.wait(300)
            if self.error is not None:
                raise self.error
        return super().put_if_absent(key, body)


def everything_said(error: BaseException) -> str:
    """Return the traceback of an error with all its causes."""
    return "".join(traceback.format_exception(error))
