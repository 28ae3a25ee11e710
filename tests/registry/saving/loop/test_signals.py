"""Handlers: whose they replace, whom they call, and that they are put back."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator

import pytest

from holdfast.registry.saving.loop.stopping import Deadline, SignalHandlers
from tests.support.processes import send


@pytest.fixture
def woken() -> list[int]:
    return []


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    os.set_blocking(ends[1], False)
    yield ends
    for end in ends:
        os.close(end)


@pytest.fixture
def install(woken, pipe):
    made: list[SignalHandlers] = []

    def install() -> SignalHandlers:
        made.append(SignalHandlers(woken.append))
        made[-1].install(pipe[1])
        return made[-1]

    yield install
    for one in reversed(made):
        one.remove()


@pytest.fixture
def put(monkeypatch):
    """Install a handler until the end of the test."""
    before: list[tuple[int, object]] = []

    def put(signum: int, handler: object) -> None:
        before.append((signum, signal.signal(signum, handler)))

    yield put
    for signum, handler in reversed(before):
        signal.signal(signum, handler)


def test_an_event_loop_that_began_meanwhile_keeps_its_file(install, pipe):
    handlers, mine = install(), os.dup(pipe[1])
    os.set_blocking(mine, False)
    signal.set_wakeup_fd(mine)
    handlers.remove()
    assert signal.set_wakeup_fd(-1) == mine
    os.close(mine)


def test_a_handler_of_another_library_is_called_too(put, install):
    heard = []
    put(signal.SIGTERM, lambda signum, frame: heard.append(signum))
    handlers = install()
    send(signal.SIGTERM)
    assert (heard, handlers.stop) == ([signal.SIGTERM], signal.SIGTERM)


def test_a_handler_that_was_installed_later_stays_and_may_call_ours(put, install, woken):
    first = signal.getsignal(signal.SIGTERM)
    handlers = install()
    ours = signal.getsignal(signal.SIGTERM)
    heard = []

    def theirs(signum, frame):
        heard.append(signum)
        ours(signum, frame)

    signal.signal(signal.SIGTERM, theirs)
    handlers.remove()
    assert signal.getsignal(signal.SIGTERM) is theirs
    send(signal.SIGTERM)
    assert (heard, handlers.stop, woken) == ([signal.SIGTERM], None, [])  # ours does nothing now
    signal.signal(signal.SIGTERM, first)


def test_a_sigint_that_is_ignored_stays_ignored(put, install):
    put(signal.SIGINT, signal.SIG_IGN)
    handlers = install()
    send(signal.SIGINT)
    assert handlers.stop is None
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_the_c_handler_wakes_the_deadline_without_python(install, pipe):
    install()
    signal.pthread_sigmask(signal.SIG_BLOCK, [])
    send(signal.SIGTERM)
    assert os.read(pipe[0], 10) == bytes([signal.SIGTERM])


def test_the_file_of_an_event_loop_is_left_alone(install, pipe):
    async def train() -> int:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR2, lambda: None)
        handlers = install()
        send(signal.SIGTERM)
        await asyncio.sleep(0)
        handlers.remove()
        fd = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(fd)
        return fd

    assert asyncio.run(train()) not in (-1, pipe[1])


def test_outside_the_main_thread_nothing_is_installed(install, caplog):
    before = signal.getsignal(signal.SIGTERM)
    with caplog.at_level("INFO"):
        thread = threading.Thread(target=install)
        thread.start()
        thread.join()
    assert signal.getsignal(signal.SIGTERM) == before
    assert "not the main thread" in caplog.text


def test_a_forked_child_gets_the_handlers_from_before(install):
    before = signal.getsignal(signal.SIGTERM)
    install()
    child = os.fork()
    if not child:
        os._exit(0 if signal.getsignal(signal.SIGTERM) == before else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert signal.getsignal(signal.SIGTERM) != before


def test_nested_blocks_both_hear(install):
    outer, inner = install(), install()
    send(signal.SIGTERM)
    assert (outer.stop, inner.stop) == (signal.SIGTERM, signal.SIGTERM)


def test_a_deadline_passes_once_after_the_first_request():
    heard, passed = [], threading.Event()
    late: list[int] = []

    def on_late(signum: int) -> None:
        late.append(signum)
        passed.set()

    deadline = Deadline(0.01, heard.append, on_late)
    deadline.begin(signal.SIGUSR1)  # no request to stop
    deadline.begin(signal.SIGINT)
    deadline.begin(signal.SIGTERM)
    assert passed.wait(300)
    deadline.close()
    assert (heard, late) == ([signal.SIGINT], [signal.SIGINT])


def test_a_deadline_that_is_cancelled_does_not_pass():
    heard, late = threading.Event(), []
    deadline = Deadline(60, lambda signum: heard.set(), late.append)
    deadline.begin(signal.SIGTERM)
    assert heard.wait(300)
    deadline.close()
    assert late == []
