"""Precision policies: who is chosen, what is refused, what is recorded, and the way back."""

from __future__ import annotations

import logging
import math
import sys
import tracemalloc
from operator import attrgetter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import holdfast
from holdfast import Storing
from holdfast.registry import pytree
from holdfast.registry.errors import Conflict, IncompatibleState, InvalidInput, UnsupportedValue
from holdfast.registry.face.run import Run
from holdfast.registry.loading.stored import load_to_train
from holdfast.registry.pytree import FlatComponent, numpy_arrays
from holdfast.registry.spec import RunSpec
from holdfast.registry.spec.precision.policy import AUTO_BYTES, Precision, optimizer_leaves
from tests.support.states import run_by
from tests.support.stores import contents, new_backend, small_grid
from tests.support.strategies import json_values, quick


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def model_state() -> dict:
    return {
        "model": {"w": numbers(40, 30), "b": numbers(30).double(), "n": torch.arange(90)},
        "traces": {"t": np.linspace(-1, 1, 200, dtype=np.float32)},
        "epoch": 3,
    }


def trained() -> tuple[torch.nn.Module, dict]:
    """Return a module and a state with it and its optimizer."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 10))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(5, 20)).sum().backward()
    optimizer.step()
    return model, {"model": model.state_dict(), "trainer": optimizer.state_dict(), "epoch": 1}


def types(checkpoint) -> dict[str, tuple[str, str | None]]:
    return {path: (info.dtype, info.original) for path, info in checkpoint.tensors().items()}


def chosen(state: object, given: object, *, force: bool = False) -> dict[str, str]:
    """Return what a policy makes of a state: path and type of each tensor that it narrows."""
    flat = pytree.flatten(state)
    precision = Precision.check(given, allow_optimizer=force)
    assert precision is not None
    return {
        part.leaves[number].path: dtype
        for part, taken in zip(flat.components, precision.choose(flat, where="x"), strict=True)
        for number, dtype in taken.items()
    }


# Choosing


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("bf16", {"model/w": "bfloat16", "model/b": "bfloat16", "traces/t": "bfloat16"}),
        ("keep", {}),
        ("auto", {}),
        ({"model/*": "fp16"}, {"model/w": "float16", "model/b": "float16"}),
        ({"model/**": "fp16"}, {"model/w": "float16", "model/b": "float16"}),
        ({"model/w": "fp16", "*": "bf16"}, {
            "model/w": "float16", "model/b": "bfloat16", "traces/t": "bfloat16",
        }),
        ({"*/b": "keep", "m*": "bf16"}, {"model/w": "bfloat16"}),
        ({"*/[bt]": "bf16"}, {"model/b": "bfloat16", "traces/t": "bfloat16"}),
        ({"model/n": "bf16"}, {}),
        ({"model/*": "bf16", "traces/*": "keep", "*": "fp16"}, {
            "model/w": "bfloat16", "model/b": "bfloat16",
        }),
    ],
)  # fmt: skip
def test_the_first_pattern_that_matches_decides(given, expected):
    assert chosen(model_state(), given) == expected


def test_auto_goes_by_size_as_given():
    below, at = AUTO_BYTES // 4 - 1, AUTO_BYTES // 4
    state = {"below": torch.zeros(below), "at": torch.zeros(at), "wide": np.zeros(at // 2)}
    assert chosen(state, "auto") == {"at": "bfloat16", "wide": "bfloat16"}


def test_only_float32_and_float64_are_ever_narrowed():
    names = ("bool", "uint8", "int64", "float16", "bfloat16", "float8_e5m2", "complex64")
    state = {name: torch.zeros(300_000).to(getattr(torch, name)) for name in names}
    state |= {"text": "x" * 100_000, "bytes": b"y" * 100_000, "scalar": np.float32(1), "f": 1.5}
    state["times"] = np.zeros(300_000, "datetime64[ns]")
    for policy in ("bf16", "fp16", "auto"):
        assert chosen(state, policy) == {}


@pytest.mark.parametrize("given", [None, {}])
def test_without_a_policy_there_is_none(given):
    assert Precision.check(given) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            "bf17",
            r"no such precision.*'\*'.*|expected fp16, bf16, auto, auto-fp16, keep; found 'bf17'",
        ),
        ("fp32", "Did you mean 'keep'"),
        ({"a": "float16"}, "precision 'a'.*Did you mean 'fp16'"),
        ({"a": "mixed"}, "Did you mean 'auto'"),
        ("BF16", "Did you mean 'bf16'"),
        ({"a": "Keep"}, "Did you mean 'keep'"),
        ({"a": None}, "found None.*Did you mean 'keep'"),
        ({"a": 16}, "found 16"),
        ({"": "bf16"}, "not a pattern"),
        ({5: "bf16"}, "not a pattern"),
        (["bf16"], r"a mapping of patterns to policies; found \['bf16'\]"),
        (True, "found True"),
    ],
)
def test_what_is_no_policy_is_refused(given, message):
    with pytest.raises(InvalidInput, match=message):
        Precision.check(given).resolved(RunSpec())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"modle/w": "bf16"}, r"precision 'modle/w': a pattern matches no tensor.*'model/w'"),
        ({"nothing/*": "bf16", "*": "auto"}, r"'nothing/\*'.*matches no tensor"),
        ({"*": "auto", "model/*": "bf16"}, r"'model/\*': earlier patterns.*narrower one first"),
        ({"model/*": "auto", "model/w": "keep"}, "'model/w': earlier patterns"),
    ],
)
def test_a_pattern_that_decides_about_nothing_is_refused(given, message):
    with pytest.raises(InvalidInput, match=message):
        chosen(model_state(), given)


def test_what_means_everything_may_be_left_with_nothing():
    assert chosen({"epoch": 1}, "bf16") == {}
    state = model_state()
    assert len(chosen(state, {"model/*": "bf16", "traces/*": "bf16", "**": "auto"})) == 3


# Optimizer state

MOMENTS = {"m": torch.ones(50), "step": torch.tensor(1.0)}


@pytest.mark.parametrize(
    "name",
    [
        *("optimizer", "Optimizer", "optimizers", "optimizer_states", "actor_optimizer", "opt"),
        *("optim", "opt_state", "critic.opt", "optim-0", "opt1", "actorOptimiser"),
    ],
)
def test_an_optimizer_is_known_by_its_key(name):
    model = {"w": torch.ones(50)}
    assert chosen({"model": model, name: MOMENTS}, "bf16") == {"model/w": "bfloat16"}
    nested = {"model": model, "all": {name: {"inner": MOMENTS}}}
    assert chosen(nested, "bf16") == {"model/w": "bfloat16"}


@pytest.mark.parametrize(
    "name", ["options", "optical_flow", "adopt", "model", "optimal", "exp_average", "momentum"]
)
def test_other_keys_are_no_optimizers(name):
    assert chosen({name: MOMENTS}, "bf16") == {f"{name}/{key}": "bfloat16" for key in MOMENTS}
    # The key of the tensor itself says nothing, unless there is no other.
    assert chosen({"model": {"opt.weight": torch.ones(3)}}, "fp16")
    assert not chosen({"optimizer": torch.ones(3)}, "fp16")


def test_an_optimizer_is_known_by_its_shape_wherever_it_lies():
    _, state = trained()
    assert set(chosen({**state, "deep": [{"x": state["trainer"]}]}, "bf16")) == {
        f"model/{key}" for key in state["model"]
    }
    # Not every dict with a `state` is one.
    assert chosen({"env": {"state": torch.ones(3)}}, "bf16") == {"env/state": "bfloat16"}


MOMENT_KEYS = (
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg"),
    *("grad_avg", "acc_delta", "state.layer.0.exp_avg_sq"),
)


@pytest.mark.parametrize("key", MOMENT_KEYS)
def test_moments_are_known_by_their_own_keys(key):
    # What `optimizer.state_dict()["state"]` holds has no `param_groups` beside it.
    for state in (
        {"adam": {0: {"step": 1, key: torch.ones(50)}}},
        {"adam": {key: {"w": torch.ones(50)}}},
        {key: torch.ones(50)},
    ):
        assert chosen({**state, "model": {"w": torch.ones(3)}}, "fp16") == {"model/w": "float16"}
    with pytest.raises(InvalidInput, match="optimizer state would lose precision"):
        chosen({"adam": {0: {key: torch.ones(50)}}}, {"adam/*": "bf16"})


def test_mu_and_nu_are_moments_side_by_side():
    one = {"w": torch.ones(5)}
    assert chosen({"tx": {"inner": [{"mu": one, "nu": one}]}}, "bf16") == {}
    alone = {"vae": {"mu": one, "logvar": one}, "flow": {"nu": one}}
    assert set(chosen(alone, "bf16")) == {"vae/mu/w", "vae/logvar/w", "flow/nu/w"}


@quick
@given(json_values)
def test_a_skeleton_from_anywhere_is_looked_at_without_an_error(skeleton):
    optimizer_leaves(FlatComponent("model", skeleton, ()))
    pairs = [["state", {"t": 3}], ["param_groups", skeleton], ["more", {"t": [skeleton]}]]
    for node in ({"d": pairs}, {"sd": [pairs, skeleton]}, [{"dd": [None, pairs]}]):
        assert 3 in optimizer_leaves(FlatComponent("model", node, ()))
    for node in ({"d": skeleton}, {"sd": skeleton}, {"dd": [skeleton]}, {"od": [skeleton]}):
        optimizer_leaves(FlatComponent("model", node, ()))


@pytest.mark.parametrize(
    "given",
    [
        {"trainer/*": "bf16"},
        {"trainer/*": "auto"},
        {"*exp_avg*": "fp16", "*": "bf16"},
        {"*/state/**": "fp16"},
    ],
)
def test_a_pattern_that_asks_for_optimizer_state_is_refused(given):
    _, state = trained()
    with pytest.raises(InvalidInput, match=r"optimizer state would lose precision; found trainer/"):
        chosen(state, given)


def test_a_pattern_that_takes_more_passes_over_optimizer_state():
    _, state = trained()
    expected = dict.fromkeys((f"model/{key}" for key in state["model"]), "bfloat16")
    assert chosen(state, {"*/*": "bf16"}) == expected
    assert chosen(state, {"[mt]*": "bf16"}) == expected


def test_unless_it_is_forced():
    _, state = trained()
    moments = {path for path in chosen(state, "bf16", force=True) if path.startswith("trainer/")}
    assert len(moments) == 12
    found = chosen(state, {"trainer/*": "bf16"}, force=True)
    assert found == dict.fromkeys(moments, "bfloat16")
    assert set(chosen(state, {"trainer/*exp_avg": "fp16"}, force=True)) == {
        path for path in moments if path.endswith("exp_avg")
    }


def test_to_keep_optimizer_state_is_not_to_ask_for_it():
    _, state = trained()
    assert set(chosen(state, {"trainer/*": "keep", "*": "bf16"})) == {
        f"model/{key}" for key in state["model"]
    }
    # Nor is there anything to lose.
    integers = {"optimizer": {"m": np.arange(50)}, "w": np.ones(50)}
    assert chosen(integers, {"optimizer/*": "bf16"}) == {}


# Tensors that share their memory


def tied(kind: str) -> dict:
    weight = numbers(30, 20)
    if kind == "parameter":
        embedding, head = torch.nn.Embedding(30, 20), torch.nn.Linear(20, 30)
        head.weight = embedding.weight
        return {"model": torch.nn.ModuleDict({"emb": embedding, "head": head}).state_dict()}
    if kind == "numpy":
        return {"model": {"emb.weight": weight.numpy(), "head.weight": weight.numpy()[:]}}
    if kind == "components":
        return {"model": {"emb.weight": weight}, "modelb": {"head.weight": weight.view(30, 20)}}
    return {"model": {"emb.weight": weight, "head.weight": weight.view(20, 30)}}


@pytest.mark.parametrize("kind", ["parameter", "numpy", "components", "reshaped"])
@pytest.mark.parametrize("policy", ["keep", "fp16"])
def test_one_memory_has_one_type(kind, policy):
    message = "share their memory.*found model/emb.weight in .*, model.?/head.weight in "
    with pytest.raises(InvalidInput, match=message):
        chosen(tied(kind), {"*/head*": policy, "*": "bf16"})
    assert set(chosen(tied(kind), {"*weight": "fp16", "*": "bf16"}).values()) == {
        "float16",
        *(["bfloat16"] if kind == "parameter" else []),
    }


def test_parts_of_one_memory_may_have_their_own_types():
    both = numbers(2, 300)
    state = {"a": both[0], "b": both[1], "e": both[:0], "f": both[:0], "n": np.zeros(0)}
    found = chosen(state, {"a": "keep", "e": "keep", "*": "bf16"})
    assert found == dict.fromkeys(("b", "f", "n"), "bfloat16")


# Saving

POLICY = {"model/*": "bf16", "traces/*": "fp16"}


def test_what_was_lossy_is_recorded_with_each_tensor(run):
    checkpoint = run.save(model_state(), step=1, storing=Storing(precision=POLICY))
    assert types(checkpoint) == {
        "model/w": ("bfloat16", "float32"),
        "model/b": ("bfloat16", "float64"),
        "model/n": ("int64", None),
        "traces/t": ("float16", "float32"),
    }
    assert checkpoint.size_bytes == 2 * 1200 + 2 * 30 + 8 * 90 + 2 * 200


def test_the_bits_are_those_of_torch(run):
    state = model_state()
    loaded = run.save(state, step=1, storing=Storing(precision=POLICY)).load()
    assert torch.equal(loaded["model"]["w"], state["model"]["w"].bfloat16())
    assert torch.equal(loaded["model"]["b"], state["model"]["b"].bfloat16())
    assert torch.equal(loaded["model"]["n"], state["model"]["n"])
    assert loaded["traces"]["t"].dtype == np.float16
    assert np.array_equal(loaded["traces"]["t"], state["traces"]["t"].astype(np.float16))
    assert loaded["epoch"] == 3


def test_ids_are_what_they_were_without_a_policy(run, reg):
    plain = run.save(model_state(), step=1)
    kept = reg.create_run("kept").save(
        model_state(), step=1, storing=Storing(precision={"model/*": "keep"})
    )
    small = reg.create_run("auto").save(model_state(), step=1, storing=Storing(precision="auto"))
    assert plain.digest == kept.digest == small.digest
    lossy = reg.create_run("lossy").save(model_state(), step=1, storing=Storing(precision=POLICY))
    assert lossy.digest != plain.digest


def test_what_it_was_is_part_of_the_id_and_not_of_the_content(run):
    state = {"w": numbers(1000)}
    narrowed = run.save(state, step=1, storing=Storing(precision="bf16"))
    cast = run.save({"w": state["w"].bfloat16()}, step=2)
    from_double = run.save({"w": state["w"].double()}, step=3, storing=Storing(precision="bf16"))
    assert len({narrowed.digest, cast.digest, from_double.digest}) == 3
    contents_ = {one.tensors()["w"].content for one in (narrowed, cast, from_double)}
    assert len(contents_) == 1
    # The chunk is stored once.
    assert len({one.manifest.components["w"].tensors[0].chunks for one in (narrowed, cast)}) == 1


def test_the_caller_keeps_what_was_given(run):
    state = model_state()
    before = {key: value.clone() for key, value in state["model"].items()}
    run.save(state, step=1, storing=Storing(precision="bf16"))
    assert all(torch.equal(state["model"][key], before[key]) for key in before)


def test_in_the_background_the_same_is_saved_of_what_was_there_then(run, reg):
    state = model_state()
    expected = reg.create_run("other").save(
        model_state(), step=1, storing=Storing(precision=POLICY)
    )
    pending = run.save_async(state, step=1, storing=Storing(precision=POLICY))
    state["model"]["w"].zero_()
    assert pending.wait().digest == expected.digest


def test_the_same_save_again_is_the_same_checkpoint(run):
    first = run.save(model_state(), step=1, storing=Storing(precision=POLICY))
    assert run.save(model_state(), step=1, storing=Storing(precision=POLICY)) == first
    with pytest.raises(Conflict, match="another state"):
        run.save(model_state(), step=1)


def test_companions_stay_as_they_are(run):
    checkpoint = run.save(
        model_state(),
        step=1,
        storing=Storing(precision="bf16"),
        companions={"reference": model_state()},
    )
    assert set(types(checkpoint.companion("reference")).values()) == {
        ("float32", None), ("float64", None), ("int64", None),
    }  # fmt: skip


def test_tensors_that_lie_anyhow(run):
    wide = numbers(30, 40)
    state = {
        "transposed": wide.t(),
        "strided": wide[::3, 1::2],
        "empty": torch.zeros(0, 5),
        "scalar": torch.tensor(1 / 3),
        "numpy": np.asfortranarray(wide.numpy()),
        "sparse": torch.eye(9).mul(1 / 3).to_sparse(),
    }
    checkpoint = run.save(state, step=1, storing=Storing(precision="bf16"))
    loaded, back = checkpoint.load(), checkpoint.load(precision="original")
    for name in ("transposed", "strided", "empty", "scalar"):
        assert torch.equal(loaded[name], state[name].bfloat16())
        assert torch.equal(back[name], state[name].bfloat16().float())
    assert np.array_equal(back["numpy"], wide.bfloat16().float().numpy())
    assert back["sparse"].dtype == torch.float32
    assert torch.equal(back["sparse"].to_dense(), state["sparse"].to_dense().bfloat16().float())


@pytest.mark.parametrize("compression", ["none", "zstd", "lz4"])
def test_large_tensors_with_any_codec_and_deltas(run, compression):
    with small_grid(1000, list_threshold=8):
        for step in range(3):
            weights = numbers(100, 70)
            weights[step] += 1
            state = {"w": weights, "few": weights[:9]}
            run.save(state, step=step, storing=Storing(precision="fp16", compression=compression))
            assert run.latest().manifest.chunk_lists
            back = run.latest().load(precision="original")
            assert torch.equal(back["w"], weights.half().float())
            assert torch.equal(back["few"], weights[:9].half().float())


@pytest.mark.parametrize("order", ["C", "F"])
def test_a_state_is_never_there_twice(tmp_path, order):
    size, count = 2**20, 40
    # In the order of Fortran it has to be copied even before it is rounded.
    state = {f"w{i}": np.full((512, 512), i, np.float32, order) for i in range(count)}
    with holdfast.init(tmp_path / "reg", skip_race_probe=True) as opened:
        run = opened.create_run("run")
        with small_grid(size, pack_bytes=size):
            tracemalloc.start()
            try:
                run.save(state, step=1, storing=Storing(precision="bf16"))
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
    # Half of the state, all at once, would be 20 MiB.
    assert peak < 14 * size


# Refused, and nothing written


@pytest.mark.parametrize(
    ("state", "given", "error", "message"),
    [
        (
            {"a": {"w": torch.ones(500)}, "model": {"w": torch.tensor([1.0, -7e4, 6e4])}},
            {"a/*": "bf16", "model/*": "fp16"},
            UnsupportedValue,
            "model/w: a number that fp16 cannot hold.*at most 65504.*found -70000.*'bf16'",
        ),
        (
            {"w": np.array([1e39])},
            "bf16",
            UnsupportedValue,
            r"w: a number that bf16.*3\.39e38.*1e\+39",
        ),
        (
            {"adam": {"v": np.full(100, 1e-9, np.float32)}, "w": torch.ones(3)},
            "fp16",
            UnsupportedValue,
            "adam/v: numbers that fp16.*become zero.*at most 1%.*found 100 of 100.*'bf16'",
        ),
        (
            {"w": np.full(9, 1e-50)},
            "bf16",
            UnsupportedValue,
            "w: numbers that bf16.*become zero.*found 9 of 9.*'keep' for this tensor",
        ),
        ({"w": np.full(2**18, 1e39)}, "auto", UnsupportedValue, "w: a number that bf16.*'keep'"),
        (trained()[1], {"trainer/*": "bf16"}, InvalidInput, "optimizer state would lose"),
        (model_state(), {"other": "bf16"}, InvalidInput, "matches no tensor"),
        (model_state(), "half", InvalidInput, "no such precision.*'fp16'"),
        (model_state(), 16, InvalidInput, "not a precision"),
    ],
)
@pytest.mark.parametrize("how", ["save", "exchange.push", "save_async"])
def test_a_refused_save_writes_nothing(backend, run, state, given, error, message, how):
    before = contents(backend)
    with pytest.raises(error, match=message):
        saved = attrgetter(how)(run)(state, step=1, storing=Storing(precision=given))
        saved.wait()
    assert contents(backend) == before
    assert run.save(state, step=1).digest == run.latest().digest


def test_nan_and_infinity_pass(run):
    values = torch.tensor([math.nan, math.inf, -math.inf, 1.0] * 20)
    for step, policy in enumerate(("bf16", "fp16")):
        back = run.save({"w": values}, step=step, storing=Storing(precision=policy)).load(
            precision="original"
        )
        assert torch.equal(torch.isnan(back["w"]), torch.isnan(values))
        assert torch.equal(back["w"].nan_to_num(5.0), values.nan_to_num(5.0))


def test_one_in_a_hundred_may_vanish(run):
    values = torch.full((200,), 1.0)
    values[:100] = 0.0
    values[7] = 1e-9
    back = run.save({"w": values}, step=1, storing=Storing(precision="fp16")).load()
    assert back["w"].count_nonzero() == 100
    values[8] = -1e-9
    with pytest.raises(UnsupportedValue, match="found 2 of 102"):
        run.save({"w": values}, step=2, storing=Storing(precision="fp16"))


def test_misspelt_options_are_refused(run):
    with pytest.raises(TypeError, match="unexpected keyword argument 'precison'"):
        run.save(model_state(), step=1, precison="bf16")


PRESET = """
name = "strict"
finite = ["model/*"]
[[dtypes]]
path = "model/*"
dtype = "float32"
"""


@pytest.fixture
def strict(reg, tmp_path) -> Run:
    """A run that demands float32 of its model, and watches it."""
    return run_by(reg, tmp_path, PRESET)


def test_a_demanded_type_is_demanded_of_what_is_stored(strict, backend):
    state = {"model": {"w": numbers(90)}, "ema": {"w": numbers(90)}}
    before = contents(backend)
    message = r"stored in a dtype that the run.*model/w is bfloat16, must be float32.*'keep'"
    with pytest.raises(IncompatibleState, match=message):
        strict.save(state, step=1, storing=Storing(precision="bf16"))
    assert contents(backend) == before
    checkpoint = strict.save(
        state, step=1, storing=Storing(precision={"model/*": "keep", "*": "bf16"})
    )
    assert types(checkpoint)["ema/w"] == ("bfloat16", "float32")
    assert checkpoint.load()["ema"]["w"].dtype == torch.bfloat16


def test_what_is_not_finite_is_found_in_what_is_stored(reg, tmp_path):
    run = run_by(reg, tmp_path, 'name = "watching"\nfinite = ["model/*"]')
    run.save({"model": {"w": numbers(90)}}, step=1, storing=Storing(precision="fp16"))
    spoilt = run.save(
        {"model": {"w": torch.full((90,), math.nan)}}, step=2, storing=Storing(precision="fp16")
    )
    assert spoilt.nonfinite == ("model/w",)
    assert run.latest().step == 1


# Loading


def test_originals_come_back_in_their_types(run):
    state = model_state()
    checkpoint = run.save(state, step=1, storing=Storing(precision=POLICY))
    back = checkpoint.load(precision="original")
    assert torch.equal(back["model"]["w"], state["model"]["w"].bfloat16().float())
    assert torch.equal(back["model"]["b"], state["model"]["b"].bfloat16().double())
    assert torch.equal(back["model"]["n"], state["model"]["n"])
    assert back["traces"]["t"].dtype == np.float32
    only = checkpoint.load(only="traces", precision="original")
    assert np.array_equal(only["traces"]["t"], back["traces"]["t"])


def test_arrays_of_bfloat16_need_ml_dtypes_and_their_originals_do_not(run, monkeypatch):
    checkpoint = run.save({"n": np.linspace(0, 1, 90)}, step=1, storing=Storing(precision="bf16"))
    assert checkpoint.load()["n"].dtype.name == "bfloat16"
    monkeypatch.delitem(numpy_arrays._NATIVE, "bfloat16")
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(IncompatibleState, match=r"n: numpy arrays of bfloat16.*'original'"):
        checkpoint.load()
    assert checkpoint.load(precision="original")["n"].dtype == np.float64


def test_where_nothing_was_lossy_nothing_is_widened(run):
    checkpoint = run.save({"w": numbers(90).bfloat16()}, step=1)
    assert checkpoint.load(precision="original")["w"].dtype == torch.bfloat16


def test_saving_what_came_back_loses_nothing_more(run):
    checkpoint = run.save(model_state(), step=1, storing=Storing(precision=POLICY))
    again = run.save(
        checkpoint.load(precision="original"), step=2, storing=Storing(precision=POLICY)
    )
    assert again.digest == checkpoint.digest


@pytest.mark.parametrize("precision", ["float32", "full"])
def test_there_are_two_precisions_to_load_in(run, precision):
    checkpoint = run.save(model_state(), step=1)
    with pytest.raises(InvalidInput, match="expected 'stored' or 'original'"):
        checkpoint.load(precision=precision)


def test_a_model_of_the_original_type_is_filled(run):
    model, state = trained()
    checkpoint = run.save(state, step=1, storing=Storing(precision={"model/*": "bf16"}))
    fresh = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 10))
    report = checkpoint.load_into(fresh, component="model")
    assert set(report.loaded) == {f"model/{key}" for key in state["model"]}
    for mine, theirs in zip(fresh.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs.bfloat16().float())
        assert mine.dtype == torch.float32
    narrow = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 10)).bfloat16()
    checkpoint.load_into(narrow, component="model")
    assert torch.equal(narrow[0].weight, model[0].weight.bfloat16())


def test_a_model_of_a_third_type_is_refused_and_left_alone(run):
    checkpoint = run.save({"w": numbers(90)}, step=1, storing=Storing(precision="bf16"))
    for dtype in (torch.float64, torch.float16):
        target = {"w": torch.ones(90, dtype=dtype)}
        with pytest.raises(IncompatibleState, match=r"w is bfloat16\[90\], target float"):
            checkpoint.load_into(target)
        assert torch.equal(target["w"], torch.ones(90, dtype=dtype))


def test_an_exact_checkpoint_is_not_cast_into_another_type(run):
    checkpoint = run.save({"w": numbers(90).bfloat16()}, step=1)
    with pytest.raises(IncompatibleState, match=r"w is bfloat16\[90\], target float32\[90\]"):
        checkpoint.load_into({"w": torch.ones(90)})


def test_targets_that_lie_anyhow_are_filled(run):
    wide = numbers(30, 40)
    state = {"t": wide, "n": wide.numpy(), "e": torch.zeros(0, 3), "s": torch.tensor(1 / 3)}
    checkpoint = run.save(state, step=1, storing=Storing(precision="fp16"))
    target = {
        "t": torch.empty(40, 30).t(),
        "n": np.empty((30, 80), np.float32)[:, ::2],
        "e": torch.ones(0, 3),
        "s": torch.tensor(0.0),
    }
    with small_grid(500):
        checkpoint.load_into(target)
    assert torch.equal(target["t"], wide.half().float())
    assert np.array_equal(target["n"], wide.half().float().numpy())
    assert target["s"] == torch.tensor(1 / 3).half()


def test_tied_tensors_are_widened_once(run):
    tied = numbers(64, 8)
    checkpoint = run.save(
        {"m": {"head": tied, "tail": tied}}, step=1, storing=Storing(precision="bf16")
    )
    memory = torch.zeros(64, 8)
    checkpoint.load_into({"m": {"head": memory, "tail": memory}})
    assert torch.equal(memory, tied.bfloat16().float())
    with pytest.raises(IncompatibleState, match="share memory"):
        both = torch.zeros(96, 8)
        checkpoint.load_into({"m": {"head": both[:64], "tail": both[32:]}})


@quick
@given(st.data())
def test_any_numbers_come_back_as_torch_rounds_them(data):
    dtype = data.draw(st.sampled_from(["float32", "float64"]))
    elements = st.floats(-60000, 60000, width=32)
    shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=9)
    values = data.draw(hnp.arrays(dtype, shapes, elements=elements))
    policy = data.draw(st.sampled_from(["bf16", "fp16"]))
    narrow = torch.bfloat16 if policy == "bf16" else torch.float16
    # Tensors much of which would vanish are refused.
    values = np.where((torch.from_numpy(values).to(narrow) == 0).numpy(), 0, values).astype(dtype)
    with (
        holdfast.registry.face.factory.open_on(new_backend()) as opened,
        small_grid(64, list_threshold=3),
    ):
        state = {"t": torch.from_numpy(values.copy()), "n": values}
        checkpoint = opened.create_run("run").save(state, step=1, storing=Storing(precision=policy))
        expected = state["t"].to(narrow)
        assert torch.equal(checkpoint.load(only="t")["t"], expected)
        back = checkpoint.load(precision="original")
        assert back["n"].tobytes() == expected.to(state["t"].dtype).numpy().tobytes()
        assert back["t"].numpy().tobytes() == back["n"].tobytes()
        target = {"t": torch.empty_like(state["t"]), "n": np.empty_like(values)}
        checkpoint.load_into(target)
        assert target["n"].tobytes() == target["t"].numpy().tobytes() == back["n"].tobytes()


# Coming back to training


def test_restoring_gives_the_original_types_and_says_so(backend, open_registry, caplog):
    _, state = trained()
    open_registry(backend).create_run("run").save(state, step=1, storing=Storing(precision="bf16"))
    run = open_registry(backend).run("run")
    with caplog.at_level(logging.WARNING, "holdfast"):
        restored = run.restore()
    assert restored.state["model"]["0.weight"].dtype == torch.float32
    (record,) = caplog.records
    said = record.getMessage()
    assert said.startswith("run/main/step00000001: saved with less precision")
    assert said.endswith("model/0.weight (bfloat16), model/0.bias (bfloat16), model/1.weight "
                         "(bfloat16), model/1.bias (bfloat16)")  # fmt: skip
    run.save(restored.state, step=2)
    assert set(types(run.latest()).values()) == {("float32", None)}


def test_restoring_an_older_one_does_too(backend, open_registry, caplog):
    run = open_registry(backend).create_run("run")
    first = run.save({"w": numbers(90, seed=1)}, step=1, storing=Storing(precision="bf16"))
    run.save({"w": numbers(90, seed=2)}, step=2, storing=Storing(precision="bf16"))
    run = open_registry(backend).run("run")
    with caplog.at_level(logging.WARNING, "holdfast"):
        state = run.restore(at=first).state
    assert torch.equal(state["w"], numbers(90, seed=1).bfloat16().float())
    assert "step00000001: saved with less precision" in caplog.text


TRANSITION = """
name = "two"
[[phases]]
name = "1"
[[phases]]
name = "2"
[[transitions]]
from_phase = "1"
to_phase = "2"
source = "latest"
[[transitions.rows]]
part = "model"
change = "carry"
"""


def test_a_phase_begins_with_the_original_types(reg, tmp_path, caplog):
    run = run_by(reg, tmp_path, TRANSITION)
    run.save({"model": {"w": numbers(90)}}, step=1, phase=1, storing=Storing(precision="bf16"))
    with caplog.at_level(logging.WARNING, "holdfast"):
        begun = run.phases.transition(2)
    assert torch.equal(begun.state["model"]["w"], numbers(90).bfloat16().float())
    assert "saved with less precision" in caplog.text


def test_restoring_says_nothing_of_what_is_exact(run, caplog):
    _, state = trained()
    checkpoint = run.save(state, step=1)
    with caplog.at_level(logging.WARNING, "holdfast"):
        assert torch.equal(load_to_train(checkpoint, "cpu")["model"]["0.bias"],
                           state["model"]["0.bias"])  # fmt: skip
        run.restore()
    assert not caplog.records


def test_of_many_lossy_tensors_a_few_are_named(run, caplog):
    checkpoint = run.save(
        {str(i): numbers(9) for i in range(10)}, step=1, storing=Storing(precision="bf16")
    )
    with caplog.at_level(logging.WARNING, "holdfast"):
        load_to_train(checkpoint, "cpu")
    assert caplog.records[0].getMessage().endswith("3 (bfloat16) and 6 more")


# Everything else goes on with the stored type


def test_whatever_is_cut_or_copied_keeps_the_record(run, reg, open_registry):
    model, state = trained()
    checkpoint = run.save(state, step=1, storing=Storing(precision={"model/*": "bf16"}))
    run.pins.gates.set("g", checkpoint)
    release = run.releases.publish("1.0.0", checkpoint, only="model")
    entry = run.pool.promote(checkpoint)
    mirror = open_registry(new_backend("policy-mirror"))
    holdfast.sync(reg, mirror)
    copies = [reg.stored("run/gates/g"), release, entry, mirror.checkpoint("run/latest")]
    for copy in copies:
        assert types(copy)["model/0.weight"] == ("bfloat16", "float32")
        back = copy.load(precision="original")
        assert torch.equal(back["model"]["0.weight"], model[0].weight.bfloat16().float())
        fresh = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 10))
        copy.load_into(fresh, component="model")
        assert torch.equal(fresh[0].weight, model[0].weight.bfloat16().float())
    assert copies[-1].digest == checkpoint.digest
    assert reg.verify(deep=True).findings == ()


def test_a_merge_keeps_the_record(run):
    states = [{"model": {"w": numbers(90, seed=i)}, "same": {"w": numbers(80)}} for i in (1, 2)]
    sources = [
        run.save(one, step=i, storing=Storing(precision="bf16")) for i, one in enumerate(states)
    ]
    merged = run.exchange.merge(sources, step=5)
    assert types(merged) == dict.fromkeys(("model/w", "same/w"), ("bfloat16", "float32"))
    assert merged.components["same"] == sources[0].components["same"]


def test_lazy_tensors_and_zarr_have_the_stored_type(run):
    values = numbers(40, 30)
    checkpoint = run.save({"m": {"w": values}}, step=1, storing=Storing(precision="fp16"))
    lazy = checkpoint["m/w"]
    assert (lazy.dtype, lazy.nbytes) == (torch.float16, 2400)
    assert torch.equal(lazy[3:5, ::2], values.half()[3:5, ::2])
    assert checkpoint.lazily()["m"]["w"].dtype == torch.float16
    array = checkpoint.zarr()["m/w"]
    assert array.dtype == np.float16
    assert np.array_equal(array[...], values.half().numpy())
