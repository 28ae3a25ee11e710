"""What the ranks of a fleet do in the tests."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard

import holdfast
from holdfast.distributed import PerRank, TorchGroup, load_into
from holdfast.registry.errors import RegistryError, UnsupportedValue
from holdfast.registry.saving.collective import plan, shards
from tests.registry.saving.collective.ranks import Troubled

DEADLINE_S = 40.0
#: More calls than a save makes.
NEVER = 1000


class Net(nn.Module):
    """Parameters that cross chunks, that split unevenly, and that have fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(1024, 1500)
        self.out = nn.Linear(1500, 7)
        self.few = nn.Linear(3, 2)
        self.scale = nn.Parameter(torch.ones(5))
        self.register_buffer("seen", torch.arange(40.0))


def values(seed: int = 0) -> Net:
    """The network with its values, unsharded."""
    net = Net()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for one in net.parameters():
            one.copy_(torch.randn(one.shape, generator=generator))
    return net


def _moments(seed: int) -> dict[str, torch.Tensor]:
    return {name: one.detach().square() for name, one in values(seed).named_parameters()}


def plain(seed: int = 0) -> dict[str, Any]:
    """The state that all layouts are of."""
    state = {n: {"exp_avg_sq": one, "step": torch.tensor(3.0)} for n, one in _moments(seed).items()}
    return {"model": values(seed), "optimizer": {"state": state, "groups": [{"lr": 0.1}]}, "n": 3}


def _mesh(size: int, *names: str) -> DeviceMesh:
    if len(names) == 1:
        return init_device_mesh("cpu", (size,), mesh_dim_names=names)
    outer = 2 if size > 1 else 1
    return init_device_mesh("cpu", (outer, size // outer), mesh_dim_names=names)


def _parallelize(net: Net, mesh: DeviceMesh) -> None:
    parallelize_module(net, mesh, {"wide": ColwiseParallel(), "out": RowwiseParallel()})


def sharded(kind: str, size: int, seed: int = 0) -> dict[str, Any]:
    """The state of `plain` in a layout."""
    net = values(seed)
    match kind:
        case "fsdp":
            fully_shard(net, mesh=_mesh(size, "dp"))
        case "tp":
            _parallelize(net, _mesh(size, "tp"))
        case "fsdp-tp":
            mesh = _mesh(size, "dp", "tp")
            _parallelize(net, mesh["tp"])
            fully_shard(net, mesh=mesh["dp"])
        case "hsdp":
            fully_shard(net, mesh=_mesh(size, "replicate", "shard"))
    moments = _moments(seed)
    state = {
        name: {"exp_avg_sq": _like(one, moments[name]), "step": torch.tensor(3.0)}
        for name, one in net.named_parameters()
    }
    return {"model": net, "optimizer": {"state": state, "groups": [{"lr": 0.1}]}, "n": 3}


def _like(parameter: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return whole
    # What the rank has of it: `distribute_tensor` does not know the order of `_StridedShard`.
    made = torch.empty_like(parameter).detach()
    return made.copy_(parameter.detach()).square_()


def saved(rank: int, size: int, url: str, run_id: str, kind: str, step: int) -> str:
    """Save a layout on every rank; return the id."""
    group = TorchGroup(deadline_s=DEADLINE_S)
    with holdfast.open(url) as reg:
        run = reg.run(run_id, create=True, group=group)
        return str(run.save(sharded(kind, size), step=step).digest)


def loaded(rank: int, size: int, url: str, ref: str, kind: str) -> list[str]:
    """Load a checkpoint into a layout of other values; return the paths that are not right."""
    wanted, target = sharded(kind, size), sharded(kind, size, seed=1)
    with holdfast.open(url) as reg:
        load_into(reg.checkpoint(ref), target, group=TorchGroup(deadline_s=DEADLINE_S))
    right, found = tensors(wanted), tensors(target)
    return [path for path, one in right.items() if not torch.equal(one, found[path])]


def tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return what this rank has of each tensor."""
    moments = {n: one["exp_avg_sq"] for n, one in state["optimizer"]["state"].items()}
    every = {**state["model"].state_dict(), **{f"{n}/moment": one for n, one in moments.items()}}
    return {
        name: (one.to_local() if isinstance(one, DTensor) else one).detach()
        for name, one in every.items()
    }


#: Placements on a mesh of 2 x 2, and on one of 4.
PLACEMENTS: list[list[Placement]] = [
    [Shard(1)],
    [Shard(0), Shard(1)],
    [Shard(1), Shard(1)],
    [Shard(1), Replicate()],
]


def table() -> dict[str, torch.Tensor]:
    """Tensors that no number of ranks divides: large, small, and too small to be cut."""
    return {
        "large": torch.arange(1003 * 1501, dtype=torch.float32).reshape(1003, 1501),
        "small": torch.arange(3 * 7 * 5, dtype=torch.bfloat16).reshape(3, 7, 5),
        "tiny": torch.arange(6, dtype=torch.int16).reshape(2, 3),
    }


def saved_placements(rank: int, size: int, url: str) -> list[str]:
    """Save the table in each of the layouts, in one run; return the ids."""
    group = TorchGroup(deadline_s=DEADLINE_S)
    found = []
    with holdfast.open(url) as reg:
        run = reg.run("placements", create=True, group=group)
        for step, placements in enumerate(PLACEMENTS):
            mesh = _mesh(size, *("a", "b")[: len(placements)])
            state = {
                name: distribute_tensor(one, mesh, placements, src_data_rank=None)
                for name, one in table().items()
            }
            made = run.save(state, step=step)
            found.append(str(made.digest))
            load_into(made, state, group=group)  # its connections are apart from those of saves
    return found


def flattened_again(rank: int, size: int) -> list[str]:
    """Flatten a state that changes, with what was remembered of it; return what that got wrong."""
    mesh = _mesh(size, "a", "b")
    even = torch.arange(64 * 64, dtype=torch.float32).reshape(64, 64)

    def made(*placements: Placement, rows: int = 64) -> Any:
        return distribute_tensor(even[:rows], mesh, placements, src_data_rank=None)

    part: dict[str, Any] = {"w": made(Shard(0), Shard(1)), "x": made(Replicate(), Shard(1)), "n": 1}
    part["z"] = made(Shard(0), Replicate())
    state = {"c": part}
    flipped = DeviceMesh("cpu", mesh.mesh.T)
    changes: dict[str, Any] = {
        "nothing": lambda: None,
        "values": lambda: part["w"]._local_tensor.add_(1),
        "a plain value": lambda: part.update(n=2),
        "a new tensor with another part of the same shape": lambda: part.update(
            w=made(Shard(1), Shard(0))
        ),
        "placements": lambda: setattr(part["w"]._spec, "placements", (Shard(0), Shard(1))),
        "the mesh": lambda: setattr(part["w"]._spec, "mesh", flipped),
        "the shape": lambda: part.update(z=made(Shard(0), Replicate(), rows=63)),
        "the element type": lambda: setattr(
            part["w"], "_local_tensor", part["w"]._local_tensor.to(torch.int32)
        ),
        "an earlier tensor": lambda: part.update(
            {"w": part["x"], "x": part["w"], "y": made(Shard(0), Replicate())}
        ),
        "one tensor less": lambda: part.pop("w"),
    }
    known_shards: list[Any] = []
    wrong = []
    for what, change in changes.items():
        change()
        if _described(shards.flatten(state, known_shards)) != _described(shards.flatten(state)):
            wrong.append(what)
        known = [*known_shards]
        shards.flatten(state, known_shards)
        if [*map(id, known)] != [*map(id, known_shards)]:
            wrong.append(f"{what}: it was not remembered")
    first = part["x"] = made(Shard(0), Shard(0))
    assert _refusal(state, known_shards) == ""
    part["x"] = other = made(Shard(0), Shard(0))
    [entry] = first._spec.shard_order
    other._spec.placements = first._spec.placements
    other._spec.shard_order = (entry._replace(mesh_dims=(1, 0)),)
    if "another order" not in _refusal(state, known_shards):
        wrong.append("another order of the mesh axes")
    part["x"] = first
    assert _refusal(state, known_shards) == ""
    first._local_tensor = first._local_tensor[:1]
    if "local part" not in _refusal(state, known_shards):
        wrong.append("another part than the spec describes")
    return wrong


def _refusal(state: dict[str, Any], known_shards: list[Any]) -> str:
    try:
        shards.flatten(state, known_shards)
    except UnsupportedValue as error:
        return str(error)
    return ""


def _with(value: Any, name: str, to: Any) -> Any:
    setattr(value, name, to)
    return value


def _described(state: shards.RankState) -> list[Any]:
    [part] = state.flat.components
    return [
        part.skeleton,
        *((one.path, one.dtype, one.shape, one.nbytes) for one in part.leaves),
        *((one.whole, one.offset, one.is_copied) for one in part.leaves),
        *(bytes(one.buffer()) for one in part.leaves),
    ]


def refused_placements(rank: int, size: int, url: str) -> list[str]:
    """Save layouts that are refused; return the messages."""
    group = TorchGroup(deadline_s=DEADLINE_S)
    mesh = _mesh(size, "a")
    said = []
    with holdfast.open(url) as reg:
        run = reg.run("refused", create=True, group=group)
        for placement in (Partial(), _StridedShard(0, split_factor=2)):
            bad = DTensor.from_local(torch.ones(2, 3), mesh, [placement], run_check=False)
            try:
                run.save({"model": {"w": bad}}, step=0)
            except UnsupportedValue as error:
                said.append(str(error))
    return said


def trained(rank: int, size: int, url: str, run_id: str, until: int) -> list[str]:
    """Train with FSDP2, from the newest checkpoint on, and save each step; return the ids."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(11, 33), nn.ReLU(), nn.Linear(33, 3))
    for one in model:
        fully_shard(one, mesh=_mesh(size, "dp"))
    fully_shard(model, mesh=_mesh(size, "dp"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    made = []
    with holdfast.open(url) as reg:
        run = reg.run(run_id, create=True, group=TorchGroup(deadline_s=DEADLINE_S))
        weights, moments = get_state_dict(model, optimizer)
        target = {"model": weights, "optimizer": moments}
        begin = 0
        if found := run.restore_into(target, strict=False):
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
            own = found.load(only="data")["data"]
            assert own == {one: [found.step, one] for one in range(size)}
            begin = found.step
        for step in range(begin + 1, until + 1):
            model(torch.full((4, 11), float(step + rank))).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            weights, moments = get_state_dict(model, optimizer)
            data = PerRank([step, rank])
            pending = run.save_async(
                {"model": weights, "optimizer": moments, "data": data}, step=step
            )
            made.append(pending)
        return [str(one.wait(DEADLINE_S).digest) for one in made]


def saved_in_trouble(
    rank: int, size: int, url: str, step: int, victim: int, at: int, deadline_s: float
) -> tuple[str, int, float]:
    """Save while a rank dies (`at` below 0) or is late at one of its calls of the group.

    Returns:
        The id, or the class of the error; the rank that the error names; and a sum over the ranks
        that are left, by the training's own process group.
    """
    store = _get_default_store()
    others = [one for one in range(size) if one != victim]

    def trouble() -> None:
        if at < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        store.wait([f"ended/{one}" for one in others], timedelta(seconds=60))

    group: Any = TorchGroup(deadline_s=deadline_s)
    if rank == victim:
        group = Troubled(group, trouble, abs(at))
    try:
        answer, named = _save_once(url, group, step, size, meets=abs(at) < NEVER)
    finally:
        store.set(f"ended/{rank}", "")
    left = others if at < 0 else list(range(size))
    return answer, named, _sum_over(rank, left) if rank in left else 0.0


def _save_once(url: str, group: Any, step: int, size: int, *, meets: bool) -> tuple[str, int]:
    state = sharded("fsdp", size)
    with holdfast.open(url) as reg:
        run = reg.run("run", create=True, group=group)
        if meets:
            dist.barrier()  # so that only the rank in trouble is late
        try:
            return str(run.save(state, step=step).digest), -1
        except RegistryError as error:
            return type(error).__name__, getattr(error, "rank", -1)


def _sum_over(rank: int, ranks: list[int]) -> float:
    """Return the sum of the numbers of some ranks, by the default process group."""
    total = torch.full((1,), float(rank))
    if len(ranks) == dist.get_world_size():
        dist.all_reduce(total)
        return float(total)
    at = ranks.index(rank)  # one is dead: the others pass it along
    if at:
        before = torch.zeros(1)
        dist.recv(before, ranks[at - 1])
        total += before
    if at + 1 < len(ranks):
        dist.send(total, ranks[at + 1])
    return float(total)


def saved_while_one_dies(
    rank: int, size: int, url: str, step: int, victim: int, at: int, deadline_s: float
) -> tuple[str, int]:
    """Save in small rounds while a rank dies at an exchange; return as `saved_in_trouble`.

    `at` counts its exchanges, from 1; -1 is before its first connection, 0 never. Where the save
    succeeds, the number of exchanges is returned instead of a rank.
    """
    exchanges = []

    class Group(TorchGroup):
        def exchange(self, links: str, outgoing: Any, incoming: Any) -> dict[int, memoryview]:
            exchanges.append({*outgoing, *incoming})
            if rank == victim and len(exchanges) == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().exchange(links, outgoing, incoming)

        def _meet(self, links: str) -> None:
            super()._meet(links)
            if rank == victim and at < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    before, plan.ROUND_BYTES = plan.ROUND_BYTES, 2**16
    try:
        with holdfast.open(url) as reg:
            run = reg.run("run", create=True, group=Group(deadline_s=deadline_s))
            dist.barrier()
            try:
                run.save(_rows_in_a_line(size, step), step=step)
            except RegistryError as error:
                return type(error).__name__, getattr(error, "rank", -1)
            assert all(peers <= {rank - 1, rank + 1} for peers in exchanges), exchanges
            return "saved", len(exchanges)
    finally:
        plan.ROUND_BYTES = before


def _rows_in_a_line(size: int, seed: int) -> dict[str, Any]:
    """Return a tensor of 1.5 chunks a rank: only neighbours have parts of one chunk."""
    whole = torch.arange(size * 1571 * 1001, dtype=torch.float32).reshape(size * 1571, 1001) + seed
    mesh = _mesh(size, "dp")
    return {"w": distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)}
