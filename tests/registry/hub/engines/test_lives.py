"""Trainer, followers and engines are killed: no engine has a wrong version, or an older one."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import pytest
import torch

import holdfast
from tests.registry.hub.engines.conftest import Follow, Start, until
from tests.registry.hub.engines.lives import Life
from tests.servers.gateway import Gateway, Weather
from tests.support.commands import invoke

MANY = [*4 * ["sglang"], *2 * ["vllm"]]
#: What no program may fail by, and what only a reader must survive.
PASSING, ANY = ("busy", "lost"), ("busy", "lost", "short", "wrong")


@pytest.mark.parametrize(
    ("where", "kinds", "last", "kills", "least"),
    [
        ("s3", ["sglang"], 6, 3, 3),
        pytest.param("folder", MANY, 400, 60, 2000, marks=pytest.mark.soak),
        pytest.param(
            *("s3", MANY, 400, 60, 2000), marks=(pytest.mark.soak, pytest.mark.timeout(3600))
        ),
    ],
)
def test_no_engine_has_a_wrong_version_whoever_is_killed(
    tmp_path: Path,
    request: pytest.FixtureRequest,
    where: str,
    kinds: list[str],
    last: int,
    kills: int,
    least: int,
) -> None:
    """Also over an S3 that does not answer, or gives readers short and wrong bytes."""
    place, storms = str(tmp_path / "registry"), (Weather(PASSING, 0.05), Weather(ANY, 0.15))
    with ExitStack() as stack:
        endpoints = ["", ""]
        if where == "s3":
            place = request.getfixturevalue("moto_url")()
            behind = request.getfixturevalue("moto_server").endpoint_url
            for number, storm in enumerate(storms):
                gateway = stack.enter_context(Gateway(behind))
                gateway.lie(lambda _: True, storm)
                endpoints[number] = gateway.url
        told = Life(tmp_path, stack, kinds, place, (endpoints[0], endpoints[1])).live(last, kills)
    met = storms[0].met + storms[1].met
    print(f"{told.figures()}; faults of S3: {dict(met)}")
    assert told.syncs >= least
    assert met.keys() == ({*ANY} if where == "s3" else set())


@pytest.mark.soak
def test_the_figures_of_a_policy_that_changes_a_little(
    tmp_path: Path, start: Start, follow: Follow
) -> None:
    """64 MB of bf16, 1.3 % of the elements change: seconds and bytes, beside a copy of the file."""
    save_file = pytest.importorskip("safetensors.torch").save_file
    random = torch.Generator().manual_seed(7)
    masters = {f"w{i}": torch.randn((2048, 2048), generator=random) * 0.02 for i in range(8)}
    size = sum(one.numel() for one in masters.values()) * 2
    engine = start("sglang")
    ours, theirs, shares = [], [], []
    with holdfast.init(tmp_path / "reg", compression="zstd", keyframe_every=32) as reg:
        run = reg.create_run("llm")
        follower = follow([engine], on=reg.handle.store.backend, shard_bytes=10**9)
        for step in range(1, 40):
            for one in masters.values():
                one.add_(torch.randn(one.shape, generator=random).sign_(), alpha=2.6e-7)
            weights = {name: one.bfloat16() for name, one in masters.items()}
            run.save({"model": weights}, step=step)
            begin = time.perf_counter()
            made = follower.poll()
            until(lambda made=made: follower.confirmed() == [made])  # type: ignore[misc]
            ours.append(time.perf_counter() - begin)
            shares.append(follower._folder.moved_bytes / size)
            save_file(weights, tmp_path / "new.safetensors")
            begin = time.perf_counter()
            (tmp_path / "copy").mkdir(exist_ok=True)
            shutil.copy(tmp_path / "new.safetensors", tmp_path / "copy" / "model.safetensors")
            engine.act("/update_weights_from_disk", "", {"model_path": tmp_path / "copy"})
            theirs.append(time.perf_counter() - begin)
    deltas = sorted(shares[1:])
    print(
        f"fetched of all bytes: median {median(deltas):.2%}, mean {sum(deltas) / len(deltas):.2%}, "
        f"most {deltas[-1]:.2%}; commit to confirmation {median(ours[1:]):.2f} s, most "
        f"{max(ours[1:]):.2f} s; a full copy on the same disk {median(theirs):.2f} s"
    )
    assert deltas[-1] < 0.02


@pytest.mark.soak  # each process takes 5 s of a core to import transformers
def test_a_program_of_transformers_serves_each_version_of_a_training(tmp_path: Path) -> None:
    """A new process for each version computes what the trainer computed, to the last bit."""
    pytest.importorskip("transformers")
    registry, log = tmp_path / "reg", tmp_path / "log"
    with holdfast.init(registry, skip_race_probe=True) as reg:
        reg.create_run("policy").close()
    log.touch()
    program = [sys.executable, str(Path(__file__).with_name("policy.py"))]
    with subprocess.Popen([*program, "train", registry, log]) as training:
        told = shlex.join([*program, "serve", str(log)]) + " {folder} {id}"
        words = ["follow", "policy", "--into", tmp_path / "models", "--registry", registry]
        result = invoke(*words, "--notify", told)
    assert (training.returncode, result.exit_code) == (0, 0), result.output
    noted = [json.loads(line) for line in log.read_text().splitlines()]
    trained, served = ([one[1:] for one in noted if one[0] == by] for by in ("trained", "served"))
    assert trained == served
    assert len({loss for _, loss in trained}) == 2
