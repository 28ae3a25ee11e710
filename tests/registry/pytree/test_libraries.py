"""Neither torch nor numpy is imported before a value or tag of theirs turns up."""

from __future__ import annotations

import subprocess
import sys

import holdfast
import holdfast.registry.pytree
from holdfast.registry.values.first_use import _listed

NAMES = sorted(_listed("holdfast.registry.pytree"))
EVERYTHING = f"from holdfast.registry.pytree import {', '.join(NAMES)}\n"
#: Imports holdfast.registry.pytree without the rest of the registry.
ALONE = (
    "import sys, types, holdfast\n"
    "alone = types.ModuleType('holdfast.registry')\n"
    f"alone.__path__ = {list(holdfast.registry.__path__)!r}\n"
    "sys.modules['holdfast.registry'] = alone\n"
)


def run(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_importing_and_plain_states_need_neither():
    run(
        ALONE + EVERYTHING + "flat = flatten({'a': {'x': 1.5, 'b': b'x' * 9999}})\n"
        "[c] = flat.components; data = bytearray(c.leaves[0].buffer())\n"
        "assert unflatten('dict', [('a', c.skeleton, [data])])['a']['b'] == b'x' * 9999\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )


def test_numpy_states_need_no_torch():
    run(
        "import sys; sys.modules['torch'] = None\n"
        "import numpy as np\n"
        + EVERYTHING
        + "[c] = flatten({'a': [np.arange(3), np.float32(2)]}).components\n"
        "array, view = allocate('int64', (3,), 'numpy'); view[:] = c.leaves[0].buffer()\n"
        "value = unflatten_component(c.skeleton, [array])\n"
        "assert value[0].tolist() == [0, 1, 2] and type(value[1]) is np.float32"
    )


def test_torch_states_without_torch_name_the_remedy():
    run(
        "import sys; sys.modules['torch'] = None\n"
        + EVERYTHING
        + "from holdfast.registry.errors import IncompatibleState\n"
        "assert leaf_kinds({'t': 0}) == {0: 'torch'}\n"
        "for act in (lambda: unflatten_component({'ts': [1]}, []),\n"
        "            lambda: allocate('int8', (1,), 'torch')):\n"
        "    try: act()\n"
        "    except IncompatibleState as error: assert 'pip install torch' in str(error)\n"
        "    else: raise SystemExit(1)"
    )


def test_ml_dtypes_scalars_without_ml_dtypes_name_the_remedy():
    run(
        "import sys; sys.modules['ml_dtypes'] = None\n"
        + EVERYTHING
        + "from holdfast.registry.errors import IncompatibleState\n"
        "try: unflatten_component({'ns': ['bfloat16', '803f']}, [])\n"
        "except IncompatibleState as error: assert 'ml_dtypes' in str(error)\n"
        "else: raise SystemExit(1)"
    )


def test_a_library_imported_later_is_noticed():
    run(
        EVERYTHING + "flatten({'a': 1})\n"
        "import torch; assert flatten({'a': torch.ones(1)}).components[0].is_bare"
    )


def test_exports():
    assert {"flatten", "unflatten"} <= {*NAMES}
    assert all(hasattr(holdfast.registry.pytree, name) for name in NAMES)
