"""Checkpoint folders of Hugging Face, and safetensors in shards."""

from __future__ import annotations

import argparse
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from holdfast import Run
from holdfast.registry import formats
from holdfast.registry.errors import IncompatibleState, InvalidInput
from tests.support.states import same

TENSORS = {f"layer.{n}.w": torch.randn(3, n + 1) for n in range(6)}


def sharded(folder: Path, tensors: dict[str, torch.Tensor] = TENSORS) -> Path:
    """Write an index with three shards, as transformers names them."""
    folder.mkdir(exist_ok=True)
    names, places = list(tensors), {}
    for n in range(3):
        shard = f"model-{n + 1:05d}-of-00003.safetensors"
        some = {name: tensors[name] for name in names[n::3]}
        safetensors.torch.save_file(some, folder / shard, metadata={"format": "pt"})
        places |= dict.fromkeys(some, shard)
    return indexed(folder, places)


def indexed(folder: Path, places: dict[str, str]) -> Path:
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))
    return index


def places_of(index: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads(index.read_text())["weight_map"]
    return found


def test_shards_are_read_as_one_component(run: Run, tmp_path: Path) -> None:
    index = sharded(tmp_path / "m")
    assert formats.detect(index) == "safetensors"
    assert formats.validate(index) == []
    found = formats.read(index)
    assert same(found.state, {"model": TENSORS, "metadata": {"format": "pt"}})
    assert found.size_bytes == sum(file.stat().st_size for file in (tmp_path / "m").iterdir())
    assert set(formats.inspect(index).tensors) == {f"model/{name}" for name in TENSORS}
    formats.write(tmp_path / "one.safetensors", run.save(found.state, step=1))
    assert same(safetensors.torch.load_file(tmp_path / "one.safetensors"), TENSORS)


def renamed(name: str) -> Callable[[Path], None]:
    def change(index: Path) -> None:
        places = places_of(index)
        places["layer.0.w"] = name
        indexed(index.parent, places)

    return change


def missing(index: Path) -> None:
    indexed(index.parent, {**places_of(index), "absent": "model-00001-of-00003.safetensors"})


def extra(index: Path) -> None:
    places = places_of(index)
    del places["layer.4.w"]
    indexed(index.parent, places)


def twice(index: Path) -> None:
    shard = index.with_name("model-00002-of-00003.safetensors")
    tensors = safetensors.torch.load_file(shard) | {"layer.0.w": torch.zeros(1)}
    safetensors.torch.save_file(tensors, shard, metadata={"format": "pt"})


def repeated(index: Path) -> None:
    index.write_text('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}')


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (missing, "lacks.*absent"),
        (extra, r"does not give it.*layer\.4\.w"),
        (twice, r"does not give it.*layer\.0\.w"),
        (repeated, "unique keys"),
        (
            lambda index: index.with_name("model-00003-of-00003.safetensors").unlink(),
            "no such file",
        ),
        (lambda index: index.write_text("[]"), "no weight_map"),
        (lambda index: index.write_text('{"weight_map": {}}'), "no weight_map"),
        (lambda index: index.write_text("{" * 10_000), "not JSON"),
        (renamed("../model.safetensors"), "no file name"),
        (renamed("/etc/x.safetensors"), "no file name"),
        (renamed(""), "no file name"),
        (renamed("model.bin"), "no file name"),
    ],
)
def test_indexes_that_do_not_fit(change: Any, message: str, tmp_path: Path) -> None:
    index = sharded(tmp_path / "m")
    change(index)
    with pytest.raises(InvalidInput, match=message):
        formats.read(index)
    assert formats.validate(index)
    with pytest.raises(InvalidInput, match=message):
        formats.inspect(index)


def test_every_bad_shard_is_named(tmp_path: Path) -> None:
    index = sharded(tmp_path / "m")
    extra(index)
    index.with_name("model-00003-of-00003.safetensors").unlink()
    assert len(formats.validate(index)) == 2


def folder_of(folder: Path) -> Path:
    """Make a folder with a real model of transformers, sharded, and the state of a trainer."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=40, n_positions=8, n_embd=8, n_layer=2, n_head=2, tie_word_embeddings=False
    )
    model = transformers.GPT2LMHeadModel(config)
    model.save_pretrained(folder, max_shard_size="4KB")
    assert (folder / "model.safetensors.index.json").exists()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    torch.save({"python": random.getstate()}, folder / "rng_state.pth")
    torch.save(argparse.Namespace(lr=0.1), folder / "training_args.bin")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 3, "loss": float("nan")}))
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "original").mkdir()
    (folder / "original" / "params.txt").write_bytes(b"x" * 10_000)
    return folder


@pytest.mark.filterwarnings("ignore")
def test_a_folder_of_transformers(run: Run, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = folder_of(tmp_path / "gpt2")
    assert formats.detect(folder) == "hf"
    assert formats.validate(folder, format="hf") == []
    found: Any = formats.read(folder, format="hf")
    assert found.format == "hf"
    before = transformers.GPT2LMHeadModel.from_pretrained(folder)
    stored = {name: found.state["model"][name] for name in before.state_dict()}
    assert same(stored, dict(before.state_dict()))
    optimizer = torch.load(folder / "optimizer.pt", weights_only=True)
    assert same(found.state["optimizer"], optimizer)
    assert set(found.state["files"]) == {
        *("rng_state.pth", "training_args.bin", "tokenizer.json", "original/params.txt"),
    }
    report = formats.inspect(folder, format="hf")
    assert {name for name in report.tensors if name.startswith("model/")} == {
        f"model/{name}" for name in stored
    }
    assert any(name.startswith("optimizer/state/0/") for name in report.tensors)

    formats.write(tmp_path / "back", run.save(found.state, step=1), format="hf")
    after = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "back")
    assert same(dict(after.state_dict()), dict(before.state_dict()))
    assert same(torch.load(tmp_path / "back" / "optimizer.pt", weights_only=True), optimizer)
    for name, data in found.state["files"].items():
        assert (tmp_path / "back" / name).read_bytes() == data == (folder / name).read_bytes()
    again: Any = formats.read(tmp_path / "back", format="hf", portable=True)
    assert run.exchange.push(again.state, step=2).digest == run.latest().digest


def small(folder: Path) -> Path:
    folder.mkdir()
    safetensors.torch.save_file({"a": torch.ones(2)}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    return folder


def test_a_folder_of_peft(tmp_path: Path) -> None:
    found = formats.read(small(tmp_path / "a"), format="hf")
    config = {"adapter_config.json": {"peft_type": "LORA"}}
    assert same(found.state, {"adapter": {"a": torch.ones(2)}, "json": config})
    formats.write(tmp_path / "b", found.state, format="hf")
    assert same(
        safetensors.torch.load_file(tmp_path / "b" / "adapter_model.safetensors"),
        {"a": torch.ones(2)},
    )


def test_an_optimizer_that_needs_code_is_kept_unread(tmp_path: Path) -> None:
    folder = small(tmp_path / "a")
    torch.save({"x": argparse.Namespace()}, folder / "optimizer.pt")
    found: Any = formats.read(folder, format="hf").state
    assert found["files"]["optimizer.pt"] == (folder / "optimizer.pt").read_bytes()
    formats.write(tmp_path / "b", found, format="hf")
    assert (tmp_path / "b" / "optimizer.pt").read_bytes() == found["files"]["optimizer.pt"]


def test_every_problem_of_a_folder(tmp_path: Path) -> None:
    folder = small(tmp_path / "a")
    (folder / "adapter_config.json").write_text("[]")
    (folder / "trainer_state.json").write_text("{")
    (folder / "adapter_model.safetensors").write_bytes(b"\0" * 20)
    assert len(formats.validate(folder, format="hf")) == 3
    with pytest.raises(InvalidInput):
        formats.read(folder, format="hf")
    shutil.rmtree(folder)
    folder.mkdir()
    with pytest.raises(InvalidInput, match="not a checkpoint folder"):
        formats.read(folder, format="hf")


def test_broken_links_and_loops_are_refused(tmp_path: Path) -> None:
    folder = small(tmp_path / "a")
    (folder / "extra").symlink_to(tmp_path / "gone")
    with pytest.raises(InvalidInput, match="cannot be read"):
        formats.read(folder, format="hf")
    assert formats.validate(folder, format="hf")
    (folder / "extra").unlink()
    (folder / "loop").symlink_to(folder)
    with pytest.raises(InvalidInput, match="a link"):
        formats.read(folder, format="hf")


@pytest.mark.parametrize(
    "name", ["../x", "/x", "a/../../x", "", ".", "a//b", "adapter_model.safetensors", "a\\b", "a\0"]
)
def test_names_that_leave_the_folder_are_not_written(name: str, tmp_path: Path) -> None:
    state: Any = formats.read(small(tmp_path / "a"), format="hf").state
    with pytest.raises((IncompatibleState, InvalidInput), match=r"not (the path|a safe name)"):
        formats.write(tmp_path / "b", {**state, "files": {name: b"x"}}, format="hf")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
