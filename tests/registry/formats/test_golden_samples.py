"""Every file that real programs wrote is read to the values that they said, bit for bit.

The samples are not part of the repository; without them these tests are skipped.
"""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.registry import formats
from holdfast.registry.curation.cards import read_card
from holdfast.registry.curation.pool.ratings import Rating, rate
from holdfast.registry.layouts.scanning import Scan
from holdfast.registry.layouts.table import layout_named
from holdfast.registry.pytree import TensorBytes
from holdfast.registry.spec.seeds import child, phase_sequence
from tests.support.foreign import expected, expected_arrays, foreign

#: The last test counts what the others have read: all run in one process, in this order.
pytestmark = pytest.mark.xdist_group("golden-samples")

#: What only says what the others hold.
ABOUT = ("README.md", "expected.json", "expected.npz", ".expected.json", ".expected.npz")
#: The seeds of games of Hydra's engine, which no checkpoint has.
NOT_OURS = ("hydra/sha256_seed_vectors.json",)
_read: set[str] = set()


def sample(name: str) -> Path:
    """Return a sample, and note that a test reads it."""
    path = foreign(name)
    _read.add(name)
    return path


def same(found: Any, wanted: Any, arrays: dict[str, Any], where: str = "") -> None:
    """Compare a state with the description of a real file, bit for bit."""
    match wanted:
        case {"$tensor": str(path)}:
            array = arrays[path]
            assert isinstance(found, TensorBytes), where
            assert (found.dtype, found.shape) == (array.dtype.name, array.shape), where
            assert bytes(found.data) == array.tobytes(), where
        case {"$torch_device": str(name)}:
            assert found == {"_type": "torch.device", "_value": name}, where
        case {"$dataclass": str(name), "fields": fields}:
            assert found.name.split(".")[-1] == name.split(".")[-1], where
            same(found.plain, fields, arrays, where)
        case {"$object": str(name), "dict": fields}:
            assert found["_class"].split(".")[-1] == name.split(".")[-1], where
            same(found["_dict"], fields, arrays, where)
        case dict():
            limit = {"/regions": 31, "/pathways": 23}.get(where)  # of the index
            cut = {key: key[:limit] for key in wanted}
            assert list(found) == list(cut.values()), where
            for key, value in wanted.items():
                same(found[cut[key]], value, arrays, f"{where}/{key}")
        case list():
            assert len(found) == len(wanted), where
            for index, value in enumerate(wanted):
                same(found[index], value, arrays, f"{where}/{index}")
        case _:
            assert (type(found), found) == (type(wanted), wanted), where


def parts(state: Any) -> dict[str, Any]:
    return {name: state[name] for name in ("regions", "pathways")}


def check(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name, value in wanted.items():
        there = found[name]
        assert (there.reshape(-1).tolist() if isinstance(there, np.ndarray) else there) == value


def check_cuts(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    check(found, {name: value for name, value in wanted.items() if name != "cuts"})
    rows = wanted["cuts"]
    bits = [[int(text, 16) for text in row["coefficients_bits"]] for row in rows]
    assert found["cuts"]["coefficients"].view("<u8").tolist() == bits
    for name in (
        "cut_id",
        "slot_index",
        "iteration",
        "forward_pass_index",
        "intercept",
        "is_active",
    ):
        assert found["cuts"][name].tolist() == [row[name] for row in rows]


def thalia_samples() -> list[str]:
    return [
        *(f"thalia/{name}.thalia" for name in ("minimal", "full", "fp16", "delta/stage0")),
        *(f"thalia/full.thalia.{ending}" for ending in ("zst", "lz4")),
    ]


@pytest.mark.parametrize("name", thalia_samples())
def test_a_brain(name: str) -> None:
    path = sample(name)
    wanted, arrays = expected(path)
    found = formats.read(path, portable=True)
    state: Any = found.state
    same(parts(state), {key: wanted["state"][key] for key in ("regions", "pathways")}, arrays)
    report = formats.inspect(path)
    assert found.metadata == report.metadata == wanted["metadata"]
    assert set(report.tensors) == {
        f"{'pathways' if key.startswith('pathway:') else 'regions'}/{key.removeprefix('pathway:')}"
        for key in (one.replace("/_fields/", "/") for one in wanted["tensors_on_disk"])
    }
    assert formats.detect(path) == "thalia"
    assert report.header is not None
    about = {key: value for key, value in report.header.items() if key != "version"}
    assert about == {key: wanted["header"][key] for key in about}
    assert report.header["version"] == "0.1.0"
    assert hashlib.sha256(path.read_bytes()).hexdigest() == wanted["file_sha256"]
    assert state["training_steps"] == wanted["header"]["training_steps"]
    assert formats.validate(path) == []


def test_a_delta_and_its_base() -> None:
    path = sample("thalia/delta/stage1.delta.thalia")
    wanted, arrays = expected(path)
    found = formats.read(path, portable=True)
    state: Any = found.state
    whole = {key: wanted["reconstructed_state"][key] for key in ("regions", "pathways")}
    base: Any = formats.read(sample("thalia/delta/stage0.thalia"), portable=True).state
    for kind in whole:
        for name, part in whole[kind].items():
            # The program makes each state null that neither base nor delta has.
            for key in [key for key in part if key not in base[kind].get(name, part)]:
                assert part.pop(key) is None
    same(parts(state), whole, arrays)
    assert found.metadata == wanted["metadata"]
    assert formats.validate(path) == []


def test_a_policy() -> None:
    folder = sample("cobre/v0.5.1/policy")
    wanted = json.loads((folder.parent / "expected.json").read_text())
    state: Any = formats.read(folder, format="cobre").state
    assert state["metadata"] == wanted["metadata"]
    for number, stage in enumerate(wanted["stages"]):
        check_cuts(state["cuts"][f"stage_{number:03d}"], stage["cuts"])
        for part in ("basis", "states"):
            check(state[part][f"stage_{number:03d}"], stage[part])
    assert formats.validate(folder) == []
    _read.update(str(one.relative_to(folder.parents[2])) for one in folder.rglob("*.bin"))
    _read.add("cobre/v0.5.1/policy/metadata.json")


def test_the_dictionary_of_states() -> None:
    path = sample("cobre/v0.5.1/training/dictionaries/state_dictionary.json")
    found = {one.path: one for one in layout_named("cobre").find(Scan(path.parents[2]).files)}
    assert found["training/dictionaries/state_dictionary.json"].kind in ("artifact", "stream")
    assert json.loads(path.read_text())["version"] == "1.0"


def test_a_step_file() -> None:
    path = sample("andrea/step_000100.bin")
    wanted, arrays = json.loads((path.parent / "expected.json").read_text()), expected_arrays(path)
    state: Any = formats.read(path, format="andrea", portable=True).state
    assert state["step"] == wanted[path.name]["step"] == arrays["step"]
    assert state["m"].shape == (wanted[path.name]["n_params"],)
    for name in ("weights", "m", "v"):
        assert bytes(state[name].data) == arrays[name].tobytes()
    assert hashlib.sha256(path.read_bytes()).hexdigest() == wanted[path.name]["sha256"]


@pytest.mark.parametrize("name", ["loss", "samples", "state"])
def test_a_sidecar_of_andrea(name: str) -> None:
    path = sample(f"andrea/run.{name}.json")
    found = {one.path: one for one in layout_named("andrea").find(Scan(path.parent).files)}
    assert (found[path.name].kind, found[path.name].name) == ("stream", name)
    assert json.loads(path.read_text())


def adr_samples() -> list[str]:
    return [
        *(f"milestones/best_{one}.pt" for one in ("accuracy_0.9234_epoch_0007",)),
        "milestones/best_loss_0.1234_epoch_0009.pt",
        "milestones/epoch_0010.pt",
        *(f"production/bayesian_transformer_v1.0.{patch}.pt" for patch in (0, 1)),
        *(
            f"training/epoch_{name}.pt"
            for name in (
                "0005_step_00006000",
                "0006_step_00007000",
                "0007_step_08642",
                "0008_step_00009876",
                "0009_step_00011110",
                "0010_step_00012345",
            )
        ),
    ]


@pytest.mark.parametrize("name", adr_samples())
def test_a_checkpoint_of_adr004(name: str) -> None:
    path = sample(f"adr/checkpoints/{name}")
    root = foreign("adr")
    wanted = json.loads((root / "expected.json").read_text())[name]
    state: Any = formats.read(path, portable=True).state
    if "keys" in wanted:
        assert list(state) == wanted["keys"]
        assert {key: state[key] for key in wanted["scalars"]} == wanted["scalars"]
        assert (state["config"], state.get("metrics")) == (wanted["config"], wanted["metrics"])
        assert hashlib.sha256(path.read_bytes()).hexdigest() == wanted["sha256"]
    else:  # the document's own loader refuses it
        assert "config" not in state
        assert wanted == {"upstream": "ValueError: config key missing"}
    with np.load(root / "expected.npz") as arrays:
        for key in arrays.files:
            part, _, inner = key.removeprefix(f"{name}/").partition("/")
            if not key.startswith(f"{name}/"):
                continue
            if part == "model":
                found = state["model_state_dict"][inner]
            else:
                number, _, moment = inner.partition("/")
                found = state["optimizer_state_dict"]["state"][int(number)][moment]
            assert (found.dtype, found.shape) == (arrays[key].dtype.name, arrays[key].shape), key
            assert bytes(found.data) == arrays[key].tobytes(), key
    assert formats.validate(path) == []


@pytest.mark.parametrize("version", ["1.0.0", "1.0.1"])
def test_a_card_of_adr004(version: str) -> None:
    path = sample(f"adr/checkpoints/metadata/model_cards/v{version}.yaml")
    released = path.parents[2] / f"production/bayesian_transformer_v{version}.pt"
    state: Any = formats.read(released, portable=True).state
    assert read_card(path) == state["model_card"]


def test_files_of_adr004_that_are_no_checkpoints() -> None:
    """Links that an archive has kept as text, and a file that was never renamed."""
    text = {
        "training/latest.pt": b"epoch_0010_step_00012345.pt",
        "production/latest.pt": b"bayesian_transformer_v1.0.1.pt",
        "training/epoch_0011_step_00013000.pt.tmp": b"half written",
    }
    for name, data in text.items():
        path = sample(f"adr/checkpoints/{name}")
        assert path.is_symlink() or path.read_bytes() == data
        if not path.is_symlink():
            assert formats.detect(path) is None


def test_ratings_of_hydra() -> None:
    found = json.loads(sample("hydra/openskill_vectors.json").read_text())
    assert found["defaults"]["ordinal"] == "mu - 3*sigma"
    for match in found["matches"]:
        after = rate([Rating(*pair) for pair in match["before"]], match["ranks"])
        assert [[one.mu, one.sigma] for one in after] == match["after"]
        assert [one.mu - 3 * one.sigma for one in after] == match["ordinal"]


def test_seeds_of_hydra() -> None:
    found = json.loads(sample("hydra/seedsequence_vectors.json").read_text())
    for case in found["cases"]:
        made = child(case["master_seed"], case["phase"], case["index"])
        assert list(made.spawn_key) == case["spawn_key"]
        assert made.generate_state(8).tolist() == case["generate_state_8_uint32"]
        words = struct.pack("<8I", *made.generate_state(8).tolist())
        assert words.hex() == case["session_seed_32_bytes_le_hex"]
        drawn = np.random.Generator(np.random.PCG64(made)).integers(0, 100, 3)
        assert drawn.tolist() == case["pcg64_first_3_integers_0_100"]
    spawned = phase_sequence(1, 3)
    spawned.spawn(found["after_two_spawns"]["n_children_spawned"])
    assert list(spawned.spawn(1)[0].spawn_key) == found["after_two_spawns"]["next_child_spawn_key"]


def test_no_sample_is_left_out(request: pytest.FixtureRequest) -> None:
    """It counts what the tests above have read, so it means something only after all of them."""
    root = foreign("")
    here = [one for one in request.session.items if one.path == Path(__file__)]
    if len(here) < 30:
        pytest.skip("not all tests of this file were chosen")
    files = {str(one.relative_to(root)) for one in root.rglob("*") if not one.is_dir()}
    wanted = {name for name in files if not name.endswith(ABOUT)}
    assert wanted - _read == set(NOT_OURS)
