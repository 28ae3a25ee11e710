"""Every file of a small registry is cut, grown and swapped, and each bit of it changed.

Of the bits, promise 8 changes one in each stretch of every file; all of them wait for a soak.

Nothing may come of it but a typed error that names the file, or exactly the right bits; and a deep
verification always finds it.
"""

from __future__ import annotations

import random

import pytest

from tests.damage.specimen import KINDS, Damage, small, twins

_CUTS = 12


def _flipped(data: bytes, at: int, bit: int) -> bytes:
    changed = bytearray(data)
    changed[at] ^= 1 << bit
    return bytes(changed)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_flip_of_every_bit(kind: str) -> None:
    damage = Damage(small())
    for key, data in small().files(kind).items():
        for bit in range(8 * len(data)):
            damage.examine({key: _flipped(data, *divmod(bit, 8))})
    _check_tally(kind, damage)
    print(f"{kind}: every bit: {damage}")


@pytest.mark.parametrize("cuts", [_CUTS, pytest.param(0, marks=pytest.mark.soak)])
@pytest.mark.parametrize("kind", KINDS)
def test_file_that_ends_too_early(kind: str, cuts: int) -> None:
    chance = random.Random(f"cuts in {kind}")
    damage = Damage(small())
    for key, data in small().files(kind).items():
        lengths = range(len(data))
        if cuts:
            lengths = {0, 1, len(data) - 1, *chance.sample(lengths, min(cuts, len(data)))}
        for length in lengths:
            damage.examine({key: data[:length]})
    _check_tally(kind, damage)
    print(f"{kind}: cuts: {damage}")


@pytest.mark.parametrize("kind", KINDS)
def test_file_that_goes_on_too_long(kind: str) -> None:
    damage = Damage(small())
    for key, data in small().files(kind).items():
        for more in (b"\0", b"\n", b"{}\n", data[-65:], data):
            damage.examine({key: data + more})
    # What follows a pack's trailer harms no reader, and is found all the same.
    assert (damage.refused > 0) is (kind not in ("snapshot", "epoch", "pack"))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "config"])
def test_two_files_swapped(kind: str) -> None:
    damage = Damage(twins())
    files = list(twins().files(kind).items())
    for number, (key, data) in enumerate(files):
        for other, instead in files[number + 1 :]:
            damage.examine({key: instead, other: data})
    assert damage.cases > 0
    print(f"{kind}: swaps: {damage}")


def test_file_of_another_kind_in_its_place() -> None:
    damage = Damage(small())
    for kind in KINDS:
        key = next(iter(small().files(kind)))
        for other in KINDS:
            if other != kind:
                damage.examine({key: next(iter(small().files(other).values()))})
    assert damage.cases == len(KINDS) * (len(KINDS) - 1)


@pytest.mark.parametrize("kind", ["manifest", "placement", "pack"])
def test_file_that_is_gone(kind: str) -> None:
    damage = Damage(twins())
    for key in twins().files(kind):
        damage.examine({key: None})
    assert damage.refused > 0


def _check_tally(kind: str, damage: Damage) -> None:
    """Check that damage was not only harmless where there is something to harm."""
    assert damage.cases > 0
    assert (damage.refused > 0) is (kind not in ("snapshot", "epoch")), damage
