"""Promise 8: every byte on the store is covered by a SHA-256 that is checked before it is used.

One changed bit in each stretch of every file, the ends of every file among them; a soak of
`tests/damage` changes every bit.
"""

from __future__ import annotations

import random

import pytest

from tests.damage.specimen import KINDS, Damage, small

_STRETCH = 96


@pytest.mark.parametrize("kind", KINDS)
def test_promise_8_no_file_is_trusted_unread(kind: str) -> None:
    chance = random.Random(kind)
    damage = Damage(small())
    for key, data in small().files(kind).items():
        stretches = range(0, len(data), _STRETCH)
        inside = [chance.randrange(at, min(at + _STRETCH, len(data))) for at in stretches]
        for at in {0, len(data) - 1, *inside}:
            changed = bytearray(data)
            changed[at] ^= 1 << chance.randrange(8)
            damage.examine({key: bytes(changed)})
    assert damage.cases > 0
