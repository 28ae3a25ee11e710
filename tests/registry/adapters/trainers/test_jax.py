"""Pytrees of jax: saved as plain values, restored into the structure of a target."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest

import holdfast
from tests.registry.adapters.trainers.children import Children, needs

pytestmark = needs("jax")


@pytest.mark.parametrize("kind", ["own", "libraries_optax", "libraries_equinox", "libraries_flax"])
def test_a_pytree_comes_back_as_it_was(
    reg: holdfast.Registry, children: Children, kind: str
) -> None:
    library = kind.partition("_")[2]
    if library and find_spec(library) is None:
        pytest.skip(f"not installed: {library}")
    assert children.run("jax_trees.comes_back", reg.url, kind) == 0
    if kind == "own":
        _check_plain(reg)


def _check_plain(reg: holdfast.Registry) -> None:
    """Without jax the state is dicts, lists and arrays."""
    program = (
        "import sys, holdfast\n"
        f"state = holdfast.open({reg.url!r}).checkpoint('own/latest').load()\n"
        "assert 'jax' not in sys.modules\n"
        "assert state['moments']['mean']['a'][1][0].shape == (2, 3)\n"
        "assert list(state['model']) == ['layers']\n"
        "assert state['key']['prng_key'] == 'threefry2x32'\n"
        "assert state['nothing'] == ({}, {})"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
    assert np.array_equal(
        reg.checkpoint("own/latest")["plain/weight"], np.arange(6).reshape(2, 3) * 3
    )


@pytest.mark.parametrize("what", ["places_like_the_target", "refuses"])
def test_a_target_decides_and_what_does_not_fit_is_refused(children: Children, what: str) -> None:
    assert children.run(f"jax_trees.{what}") == 0
