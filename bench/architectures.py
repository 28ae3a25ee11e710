"""Tensors of published models, and how FSDP2 and tensor parallelism cut them.

A training saves each parameter four times: in bfloat16, and as master copy and both moments of Adam
in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from holdfast.registry.pytree import ArrayLeaf, FlatState, flatten
from holdfast.registry.pytree.leaves import NamedLeaf
from holdfast.registry.saving.collective.shards import Boxes, Ints, Structure
from holdfast.registry.values.dtypes import item_size

#: A parameter: its name, its shape, and the axis that tensor parallelism cuts, if it does.
Parameter = tuple[str, tuple[int, ...], int | None]
STATES = ("master", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Architecture:
    """A model.

    Attributes:
        name: Its name and its source.
        parameters: Its parameters.
    """

    name: str
    parameters: tuple[Parameter, ...]

    @cached_property
    def flat(self) -> FlatState:
        """The state of a training, without its bytes."""
        names = [name for name, _, _ in self.parameters]
        model = dict.fromkeys(names, np.zeros(1, np.uint8))
        optimizer = {"state": {name: dict.fromkeys(STATES, model[name]) for name in names}}
        flat = flatten({"model": model, "optimizer": optimizer})
        shapes = {name: shape for name, shape, _ in self.parameters}
        components = []
        for part in flat.components:
            dtype = "bfloat16" if part.name == "model" else "float32"
            leaves: list[ArrayLeaf] = []
            of = names if part.name == "model" else [name for name in names for _ in STATES]
            for leaf, name in zip(part.leaves, of, strict=True):
                nbytes = int(np.prod(shapes[name])) * item_size(dtype)
                leaves.append(NamedLeaf(dtype, shapes[name], nbytes, leaf.path))
            components.append(type(part)(part.name, part.skeleton, tuple(leaves)))
        return FlatState(flat.kind, tuple(components))

    @cached_property
    def structure(self) -> Structure:
        """The tensors of that state."""
        leaves = [leaf for part in self.flat.components for leaf in part.leaves]
        return Structure(tuple(one.dtype for one in leaves), tuple(one.shape for one in leaves))

    def layouts(self, ranks: int, tensor_parallel: int = 1) -> list[Boxes]:
        """Return the boxes of each rank: cut by tensor parallelism, and then by FSDP2 into rows."""
        of = self.structure
        axes = [axis for _, _, axis in self.parameters]
        axes += [axis for axis in axes for _ in STATES]
        first = np.array([of.axes - len(shape) for shape in of.shapes])
        cut = np.array(
            [-1 if a is None else f + a for a, f in zip(axes, first.tolist(), strict=True)]
        )
        forms = np.column_stack([[of.padded(shape, 1) for shape in of.shapes], first, cut])
        distinct, inverse = np.unique(forms, axis=0, return_inverse=True)
        data_parallel = -(-ranks // tensor_parallel)
        made = []
        for rank in range(ranks):
            row, column = divmod(rank, tensor_parallel)
            low, extent = np.zeros_like(distinct[:, : of.axes]), distinct[:, : of.axes].copy()
            is_cut = np.flatnonzero(distinct[:, -1] >= 0)
            _cut(low, extent, is_cut, distinct[is_cut, -1], column, tensor_parallel)
            _cut(low, extent, np.arange(len(low)), distinct[:, -2], row, data_parallel)
            made.append(Boxes(np.column_stack([low, extent]), inverse.reshape(-1)))
        return made


def _cut(low: Ints, extent: Ints, rows: Ints, axis: Ints, number: int, parts: int) -> None:
    length = extent[rows, axis]
    share = -(-length // parts)
    begin = np.minimum(number * share, length)
    low[rows, axis] += begin
    extent[rows, axis] = np.minimum(begin + share, length) - begin


def gpt(name: str, layers: int, width: int, words: int, positions: int) -> Architecture:
    """Return a GPT: biases everywhere, one matrix for queries, keys and values."""
    found: list[Parameter] = [("wte", (words, width), 0), ("wpe", (positions, width), None)]
    for layer in range(layers):
        found += [
            (f"h.{layer}.{part}", shape, axis)
            for part, shape, axis in (
                ("ln_1.weight", (width,), None),
                ("ln_1.bias", (width,), None),
                ("attn.qkv.weight", (3 * width, width), 0),
                ("attn.qkv.bias", (3 * width,), 0),
                ("attn.proj.weight", (width, width), 1),
                ("attn.proj.bias", (width,), None),
                ("ln_2.weight", (width,), None),
                ("ln_2.bias", (width,), None),
                ("mlp.fc.weight", (4 * width, width), 0),
                ("mlp.fc.bias", (4 * width,), 0),
                ("mlp.proj.weight", (width, 4 * width), 1),
                ("mlp.proj.bias", (width,), None),
            )
        ]
    found += [("ln_f.weight", (width,), None), ("ln_f.bias", (width,), None)]
    return Architecture(name, tuple(found))


def llama(name: str, layers: int, width: int, keys: int, inner: int, words: int) -> Architecture:
    """Return a Llama: no biases, fewer heads for keys and values than for queries."""
    found: list[Parameter] = [("embed_tokens", (words, width), 0)]
    for layer in range(layers):
        found += [
            (f"layers.{layer}.{part}", shape, axis)
            for part, shape, axis in (
                ("q_proj", (width, width), 0),
                ("k_proj", (keys, width), 0),
                ("v_proj", (keys, width), 0),
                ("o_proj", (width, width), 1),
                ("gate_proj", (inner, width), 0),
                ("up_proj", (inner, width), 0),
                ("down_proj", (width, inner), 1),
                ("input_norm", (width,), None),
                ("post_norm", (width,), None),
            )
        ]
    found += [("norm", (width,), None), ("lm_head", (words, width), 0)]
    return Architecture(name, tuple(found))


def mixture(layers: int, width: int, experts: int, inner: int, words: int) -> Architecture:
    """Return a mixture of experts in which every expert has tensors of its own."""
    found: list[Parameter] = [("embed", (words, width), 0), ("head", (words, width), 0)]
    for layer in range(layers):
        found += [(f"layers.{layer}.o_proj", (width, 8192), 1)]
        for expert in range(experts):
            name = f"layers.{layer}.mlp.experts.{expert}"
            found += [
                (f"{name}.gate_proj", (inner, width), 0),
                (f"{name}.up_proj", (inner, width), 0),
                (f"{name}.down_proj", (width, inner), 1),
            ]
    return Architecture("Kimi K2 (arXiv 2507.20534), each expert apart", tuple(found))


#: The models of the table.
ARCHITECTURES = {
    "1.3 B": gpt("GPT-3 XL (arXiv 2005.14165, table 2.1)", 24, 2048, 50257, 2048),
    "70 B": llama("Llama 3 70B (arXiv 2407.21783, table 3)", 80, 8192, 1024, 28672, 128256),
    "1 T": gpt("GPT 1008 B of Megatron-LM (arXiv 2104.04473, table 1)", 128, 25600, 51200, 2048),
}
