"""A checkpoint's id is that of its content: one everywhere, another for every difference."""

from __future__ import annotations

import subprocess
import sys
from collections import OrderedDict

import numpy as np
import torch

import holdfast
from holdfast.registry.objects.manifest import Manifest
from tests.support.faults import flip
from tests.support.states import same, small_state
from tests.support.stores import new_backend, objects, packs_of


def state() -> dict:
    return {
        "model": {"w": torch.arange(600, dtype=torch.float32).reshape(20, 30), "n": 3},
        "rng": (1, 2.5, None, "x", b"y"),
    }


#: Recorded once; another value means that every id in every registry has changed.
RECORDED = "cecbdda10816e1a3cff34eba62033b54373e8b50b51d9c5fac768c55bb087952"


def ids(open_registry, some_state, **more) -> set[str]:
    run = open_registry(new_backend()).create_run("run")
    return {run.save(some_state, step=1, **more).digest.hex()}


def test_the_id_does_not_depend_on_store_run_step_phase_metrics_or_time(open_registry, tmp_path):
    found = ids(open_registry, state())
    found |= ids(open_registry, state(), phase=3, metrics={"loss": 1.0}, meta={"a": 1})
    with holdfast.init(tmp_path / "reg") as local:
        found.add(local.create_run("other").save(state(), step=77).digest.hex())
    with holdfast.open(tmp_path / "reg") as local:
        found.add(local.checkpoint("other").manifest.digest.hex())
    assert len(found) == 1


def test_the_id_does_not_depend_on_bases_or_packing(open_registry):
    found = ids(open_registry, state())
    run = open_registry(new_backend()).create_run("run")
    for step in range(12):
        partial = state()
        partial["model"]["w"][step] += step + 1
        run.save(partial | {"more": {"w": torch.arange(100) + step}}, step=step)
    found.add(run.save(state(), step=99).digest.hex())
    assert len(found) == 1


def test_what_was_loaded_has_the_id_that_it_was_loaded_by(open_registry):
    backend = new_backend()
    first = open_registry(backend).create_run("run").save(state(), step=1)
    loaded = open_registry(backend).run("run").latest().load()
    assert ids(open_registry, loaded) == {first.digest.hex()}


def test_the_id_does_not_depend_on_strides_ownership_or_grad(open_registry):
    one = state()
    one["model"]["w"] = torch.nn.Parameter(one["model"]["w"].T.contiguous().T)
    assert not one["model"]["w"].is_contiguous()
    two = state()
    two["model"]["w"] = torch.cat([two["model"]["w"], two["model"]["w"]])[:20]
    assert ids(open_registry, one) == ids(open_registry, two) == ids(open_registry, state())


SCRIPT = """
from tests.support.states import small_state
from tests.support.stores import new_backend
from holdfast.registry.face.factory import open_on
with open_on(new_backend()) as reg:
    print(reg.create_run("elsewhere").save(small_state(), step=5).digest.hex())
"""


def test_another_process_gives_the_same_id(open_registry):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={"PYTHONHASHSEED": "12345", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert {done.stdout.strip()} == ids(open_registry, small_state())


DIFFERENT = {
    "one bit of a tensor": lambda s: s["model"]["w"].view(torch.int32)[3, 3].bitwise_xor_(1),
    "sign of zero": lambda s: s["model"]["w"][0, 0].neg_(),
    "dtype": lambda s: s["model"].update(w=s["model"]["w"].view(torch.int32)),
    "shape": lambda s: s["model"].update(w=s["model"]["w"].reshape(30, 20)),
    "numpy for torch": lambda s: s["model"].update(w=s["model"]["w"].numpy()),
    "key order": lambda s: s.update(model={k: s["model"][k] for k in ("n", "w")}),
    "component order": lambda s: s.update(model=s.pop("model")),
    "key type": lambda s: s.update(model={"w": s["model"]["w"], 5: 3}),
    "key name": lambda s: s.update(model={"w": s["model"]["w"], "5": 3}),
    "list for tuple": lambda s: s.update(rng=list(s["rng"])),
    "OrderedDict for dict": lambda s: s.update(model=OrderedDict(s["model"])),
    "float for int": lambda s: s["model"].update(n=3.0),
    "bool for int": lambda s: s["model"].update(n=True),
    "one for True": lambda s: s["model"].update(n=1),
    "string for bytes": lambda s: s.update(rng=(1, 2.5, None, "x", "y")),
    "a float's last bit": lambda s: s.update(rng=(1, 2.5000000000000004, None, "x", b"y")),
    "absent for None": lambda s: s.update(rng=(1, 2.5, "x", b"y")),
    "one key more": lambda s: s["model"].update(m=None),
    "one component more": lambda s: s.update(more={}),
}


def test_every_difference_gives_another_id(open_registry):
    found = {"the same": state()}
    for name, change in DIFFERENT.items():
        found[name] = state()
        change(found[name])
    found["OrderedDict as a whole"] = OrderedDict(state())
    run = open_registry(new_backend()).create_run("run")
    by_id: dict = {}
    for step, (name, some) in enumerate(found.items()):
        by_id.setdefault(run.save(some, step=step).digest, []).append(name)
    assert [names for names in by_id.values() if len(names) > 1] == []


def test_equal_components_have_equal_digests_in_any_checkpoint(open_registry):
    run = open_registry(new_backend()).create_run("run")
    first = run.save({"a": small_state(1)["model"], "b": {"x": 1}}, step=1)
    second = run.save({"b": {"x": 2}, "renamed": small_state(1)["model"]}, step=2)
    assert first.components["a"] == second.components["renamed"]
    assert first.components["b"] != second.components["b"]


def test_an_id_is_recorded_and_does_not_change(open_registry):
    flat = {"model": {"w": np.arange(600, dtype=np.float32).reshape(20, 30), "lr": 0.1}}
    (found,) = ids(open_registry, flat)
    assert found == RECORDED


def test_the_manifest_of_a_damaged_pack_still_tells_the_id(open_registry):
    backend = new_backend()
    checkpoint = open_registry(backend).create_run("run").save(small_state(), step=1)
    flip(backend, packs_of(checkpoint)[0])
    (key,) = [key for key in objects(backend) if key.startswith("manifests/")]
    found = Manifest.decode(backend.get(key), checkpoint.digest, where=key)
    assert found.digest == checkpoint.digest
    assert not same(found, None)
