"""Seeds of a run: from the master seed to the seeds of phases and their components.

The tree is NumPy's. Phase p has `SeedSequence(seed, spawn_key=(p,))`. Component i of the phase has
the sequence that this one would spawn as child number i: `SeedSequence(seed, spawn_key=(p, i))`. A
child is a function of three numbers, so nobody has to count spawned children. NumPy promises that
the output of SeedSequence never changes. (`formats/hydra.md`, Seed tree.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.registry.errors import InvalidInput
from holdfast.registry.spec.run_spec import RunSpec
from holdfast.registry.values import whole

if TYPE_CHECKING:
    from numpy.random import SeedSequence


def phase_sequence(seed: int, phase: int) -> SeedSequence:
    """Return the seed sequence of a phase; it spawns its components in order."""
    return _sequence(seed, whole(phase, "phase", bits=32))


def child(seed: int, phase: int, component: int) -> SeedSequence:
    """Return the seed sequence of one component of a phase."""
    return _sequence(seed, whole(phase, "phase", bits=32), whole(component, "component", bits=32))


def pivot_child(spec: RunSpec, seed: int, phase: str, component: int, ordinal: int) -> SeedSequence:
    """Return the seed sequence of a component after a pivot within a phase.

    It has four numbers in its key, so it differs from those of the phase and of drawn opponents.
    """
    number = phase_number(spec, phase)
    return _sequence(seed, number, whole(component, "component", bits=32), 0, ordinal)


def phase_number(spec: RunSpec, phase: str) -> int:
    """Return the number of a phase in the tree of seeds.

    If all phases have numbers as names, it is that number; otherwise it is the phase's position
    among the declared ones, from 1.
    """
    names = [one.name for one in spec.phases]
    if phase.isdigit() and all(name.isdigit() for name in names):
        return int(phase)
    if phase not in names:
        raise InvalidInput(
            "a phase without a number has no seeds",
            where=f"phase {phase}",
            expected="a number, or one of the declared phases",
        )
    return names.index(phase) + 1


def _sequence(seed: int, *key: int) -> SeedSequence:
    from numpy.random import SeedSequence  # here, to keep `import holdfast` light

    return SeedSequence(whole(seed, "seed"), spawn_key=key)
