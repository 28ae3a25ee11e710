"""Two processes of one training: with Holdfast, and by the records of Burn in Hydra's folder.

`native` trains a run to a step. `foreign` goes on in its third phase: it reads and writes records
by msgpack alone, and finds no Holdfast.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import msgpack
import torch

SEED, EVERY = 0x5EED_A1B2_C3D4, 500
PARTS = {"stem": (4, 3), "policy_head": (5, 4), "value_head": (1, 4)}
#: The phase of each save, by its step: 2 saves of cloning, 2 of distillation, then the league.
PHASES = {10_000: 1, 20_000: 1, 20_500: 2, 21_000: 2}
POOL = "phase3/opponent_pool"


def fresh() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return records of new weights, and of an optimizer that has made no step."""
    source = torch.Generator().manual_seed(SEED)
    weights = {name: torch.randn(*shape, generator=source) for name, shape in PARTS.items()}
    model = {
        name: {"weight": {"id": name.upper(), "param": value.to(torch.bfloat16)}, "bias": None}
        for name, value in weights.items()
    }
    return model, fresh_optimizer()


def fresh_optimizer() -> dict[str, Any]:
    """Return the record of Burn's AdamW: a state for each parameter by its id."""
    return {
        name.upper(): {
            "momentum": {"time": 0, "moment_1": torch.zeros(shape), "moment_2": torch.zeros(shape)}
        }
        for name, shape in PARTS.items()
    }


def trained(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state after the updates to the next save; the data depend on the step."""
    step = state["global_step"] + (EVERY if state["phase"] > 1 else 10_000)
    data = torch.Generator().manual_seed(state["rng_state"]["chacha20"][0] + step)
    for name, module in state["model_record"].items():
        held = module["weight"]["param"].float()
        moments = state["optimizer_record"][name.upper()]["momentum"]
        gradient = torch.randn(held.shape, generator=data) + held / 8
        moments["time"] += 1
        moments["moment_1"] = moments["moment_1"] * 0.9 + gradient * 0.1
        moments["moment_2"] = moments["moment_2"] * 0.999 + gradient.square() * 0.001
        change = moments["moment_1"] / (moments["moment_2"].sqrt() + 1e-8)
        rate = 1e-2 * (1 + math.cos(state["scheduler_record"]["position"] / 20))
        module["weight"]["param"] = (held - rate * change).to(torch.bfloat16)
    state["scheduler_record"]["position"] += 1
    state["rng_state"]["cursor"]["file"] += 1
    metrics = {"mu": 25.0 + step / 10_000, "sigma": 2.0, "heldout_ce": 4.0 - step / 10_000}
    return {**state, "global_step": step, "metrics": metrics, "timestamp": 1_800_000_000 + step}


# With Holdfast


def first_state() -> dict[str, Any]:
    model, optimizer = fresh()
    return {
        "model_record": model,
        "optimizer_record": optimizer,
        "scheduler_record": {"position": 0},
        "rng_state": {"chacha20": [7, 8, 9], "cursor": {"epoch": 0, "file": 0}},
        "global_step": 0,
        "phase": 1,
        "config": {"blocks": 40, "lr": 1e-2},
        "metrics": {},
        "timestamp": 0,
        "checkpoint_version": 1,
    }


def native(url: str, name: str, until: int) -> None:
    """Train a run to a step, from its newest checkpoint on, through its transitions."""
    import holdfast

    torch.set_num_threads(1)  # the order of sums must not depend on who else is on the machine
    with holdfast.open(url) as reg:
        run = reg.run(name, create=True, preset="hydra", seed=SEED, overrides=OVERRIDES)
        restored = run.restore()
        state = first_state() if restored is None else restored.state
        while state["global_step"] < until:
            if state["global_step"] in (20_000, 21_000):
                state = entered(run, state["phase"] + 1)
            state = trained(state)
            if state["phase"] == 3:
                state["opponent_pool_metadata"] = {"roster": roster(run)}
            run.save(state, step=state["global_step"])
            if state["phase"] == 3:
                play(run, state["global_step"])


OVERRIDES = {"layout.records": "mpk"}


def entered(run: Any, phase: int) -> dict[str, Any]:
    """Set the gate of a phase, enter the next one, and return its first state."""
    run.pins.gates.set({2: "bc_best", 3: "distill_best"}[phase])
    state = run.phases.transition(phase, targets={"model_record": fresh()[0]}).state
    if phase == 2:
        masks = {name: torch.zeros(2, dtype=torch.bfloat16) for name in ("mask_opp", "mask_wall")}
        state["teacher_state_dict"] |= masks
    return {
        **first_state(),
        **{name: value for name, value in state.items() if name not in ("rng_state", "metrics")},
        "optimizer_record": fresh_optimizer(),
        "phase": phase,
    }


def roster(run: Any) -> list[int]:
    return [entry.version for entry in run.pool.roster()]


def play(run: Any, step: int) -> None:
    """Record a game of the newest model against an anchor and, from the second on, another one."""
    newest, others = roster(run)[-1], roster(run)[:-1]
    run.pool.record_match([newest, others[0], others[-1]], [1, 2, 3], match=f"game-{step}")
    run.streams["eval"].append({"step": step, "placement": 2.5})


# By the files


def read(path: Path) -> tuple[dict[str, Any], Any]:
    """Return the metadata of a record and its item, after its sidecar was checked."""
    data = path.read_bytes()
    digest, _, named = path.with_name(f"{path.name}.sha256").read_text().strip().partition("  ")
    assert (digest, named) == (hashlib.sha256(data).hexdigest(), path.name)
    found = msgpack.unpackb(data, strict_map_key=False)
    return found["metadata"], tensors(found["item"])


def tensors(value: Any) -> Any:
    if isinstance(value, dict) and value.keys() == {"bytes", "shape", "dtype"}:
        kind = {"F32": torch.float32, "BF16": torch.bfloat16}[value["dtype"]]
        return torch.frombuffer(bytearray(value["bytes"]), dtype=kind).reshape(value["shape"])
    if isinstance(value, dict):
        return {key: tensors(item) for key, item in value.items()}
    return value


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        data = value.contiguous().view(torch.uint8).numpy().tobytes()
        kind = {torch.float32: "F32", torch.bfloat16: "BF16"}[value.dtype]
        return {"bytes": data, "shape": list(value.shape), "dtype": kind}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value


def write(path: Path, metadata: dict[str, Any], item: Any) -> None:
    """Write a record in the eight steps of the document."""
    data = msgpack.packb({"metadata": metadata, "item": plain(item), "_b": None})
    staged = path.with_name(f"{path.name}.tmp")
    staged.write_bytes(data)
    staged.replace(path)
    line = f"{hashlib.sha256(data).hexdigest()}  {path.name}\n"
    path.with_name(f"{path.name}.sha256").write_text(line)


def foreign(root: Path, until: int) -> None:
    """Go on in the league, with a model of each save in the pool, and a game of each."""
    torch.set_num_threads(1)
    folder = root / "phase3/checkpoints"
    newest = folder / (folder / "latest.mpk").readlink()
    metadata, state = read(newest)
    _, anchor = read(newest.with_name(newest.name.replace(".mpk", ".kl_anchor.mpk")))
    while state["global_step"] < until:
        state = trained(state)
        known = sorted((root / POOL).glob("*.meta.json"))
        version = int(known[-1].name[6:10]) + 1
        state["opponent_pool_metadata"] = {"roster": [int(one.name[6:10]) for one in known]}
        step = state["global_step"]
        name = f"ckpt_phase3_step{step:08d}"
        write(folder / f"{name}.kl_anchor.mpk", metadata, anchor)
        write(folder / f"{name}.mpk", metadata, state)
        point(folder / "latest.mpk", f"{name}.mpk")
        model = root / POOL / f"pool_v{version:04d}_step{step:08d}"
        about = {
            "version": version, "global_step": step, "phase": 3, "mu": 25.5, "sigma": 2.25,
            "games_played": 4, "win_rate": 0.75, "promoted_at": "2026-03-01 12:00:00Z",
        }  # fmt: skip
        model.with_name(f"{model.name}.meta.json").write_text(f"{json.dumps(about, indent=2)}\n")
        write(
            model.with_name(f"{model.name}.mpk"), metadata, {"model_record": state["model_record"]}
        )
        before = json.loads(known[-1].read_text())  # a game more of the one before
        rate = (before["win_rate"] or 0) * before["games_played"] / (before["games_played"] + 1)
        before |= {"mu": 24.0, "games_played": before["games_played"] + 1, "win_rate": rate}
        known[-1].write_text(f"{json.dumps(before, indent=2)}\n")
        with (root / "eval/eval.jsonl").open("a") as log:
            log.write(f"{json.dumps({'step': step, 'placement': 2.25})}\n")


def point(link: Path, target: str) -> None:
    staged = link.with_name(f"{link.name}.tmp")
    staged.symlink_to(target)
    staged.replace(link)
