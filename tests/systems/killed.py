"""A process that trains to the next save and is killed in the middle of it."""

from __future__ import annotations

import os
import signal

import torch

from holdfast.backends import open_backend
from holdfast.backends.base import Body
from holdfast.backends.wrappers import Wrapper
from holdfast.registry.face.factory import open_on
from tests.systems.hydra_life import clone
from tests.systems.mutants import make_named


class Killing(Wrapper):
    """A store whose third write is the last thing that its process does."""

    writes = 0

    def put(self, key: str, body: Body) -> None:
        self._count()
        super().put(key, body)

    def put_if_absent(self, key: str, body: Body) -> bool:
        self._count()
        return super().put_if_absent(key, body)

    def _count(self) -> None:
        self.writes += 1
        if self.writes == 3:
            os.kill(os.getpid(), signal.SIGKILL)


def clone_until_killed(url: str, run_id: str, number: int) -> None:
    """Train to the next save of phase 1, and die in it."""
    torch.set_num_threads(1)  # the order of sums must not depend on who else is on the machine
    make_named()
    clone(open_on(Killing(open_backend(url))), run_id, number)
