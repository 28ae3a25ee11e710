"""States: nested Python values taken apart into JSON and arrays, and put together bit for bit.

`flatten` makes a `FlatState` of a state, `unflatten` makes the state again; `encoding` and
`decoding` are their walks. `containers`, `scalars`, `numpy_arrays`, `torch_arrays` have one codec
for each type below, and `jax_arrays` for arrays of jax; `adapters` lets callers add types of their
own. `survey` finds the arrays of a skeleton from a store, and checks it before it is used. Only
`torch_arrays` and `torch_memory` import torch.

The table below decides bytes, so it decides ids: a tag may be added, none changes its meaning.
Specified in docs/spec.md, section 4.

A component's skeleton is one node. None, true, false, strings and integers within 2^53 are
themselves and a list is a JSON array of nodes; everything else is an object with one key, its tag.
N is a node, P a list of pairs [N, N] in order, A the number of an array (each component counts its
own from 0, in the order of the skeleton), H 16 hexadecimal digits of a double's bits, I an integer
as a node.

    tag                        payload                       value
    t  n                       A                             torch tensor, numpy array (or jax's)
    nt                         [A, "datetime64[ns]"]         numpy array of times, as int64
    B  BA  S                   A                             bytes, bytearray over 4096 bytes, str
                                                             over 64 KiB of UTF-8: uint8 arrays
    b  ba                      base64                        bytes, bytearray
    i                          "-1f..."                      int beyond 2^53, hexadecimal
    f  c                       H  [H, H]                     float, complex
    d  od  counter             P                             dict, OrderedDict, Counter
    sd                         [P, N]                        OrderedDict and its `_metadata`
    dd                         [factory or null, P]          defaultdict of bool, bytes, dict,
                                                             float, int, list, set, str, tuple
    tu                         [N, ...]                      tuple
    set  fset                  [N, ...]                      set, frozenset; ascending by the items'
                                                             canonical bytes
    deque                      [maxlen I or null, [N, ...]]  deque
    range  slice               [I, I, I]  [N, N, N]          range, slice
    ellipsis                   true                          ...
    decimal  fraction          string  [I, I]                Decimal, Fraction (reduced, 16384 bits)
    uuid                       32 hexadecimal digits         UUID
    datetime  time             [ISO, fold, Z]                datetime, time; ISO without a zone
    date  td                   ISO  [days, s, us]            date, timedelta
    tz                         Z                             timezone, ZoneInfo; Z is null, "utc",
                                                             ["offset", days, s, us, name or null]
                                                             or ["zone", key]
    path                       [flavour, text]               posix, windows, pureposix, purewindows
    ns  nd                     [dtype, hex bytes]  dtype     numpy scalar (little-endian), dtype
    ts  tt  tv                 [I, ...]  "float32"  "cuda:0" torch Size, dtype, device
    tver                       "2.13.0+cpu"                  torch.torch_version.TorchVersion
    coo                        [shape, coalesced, N, N]      sparse: indices, values
    csr  csc  bsr  bsc         [shape, N, N, N]              sparse: compressed, plain, values
    ad                         [name, N]                     what the named adapter makes of N

Keys, items of sets, parts of slices and `_metadata` hold no arrays, and strings of any length are
inline there. At most 100 containers nest. A payload without nodes has one spelling for each value;
any other is malformed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.registry.values.first_use import at_first_use

if TYPE_CHECKING:
    from holdfast.registry.pytree.adapters import register_adapter
    from holdfast.registry.pytree.arrays import allocate, describe, unread, view_of
    from holdfast.registry.pytree.encoding import Adapted, Encoder, Handler, registered
    from holdfast.registry.pytree.flattening import (
        DICTS,
        FlatComponent,
        FlatState,
        await_devices,
        cut_down,
        flatten,
        pairs_of,
        renumbered,
        steps_at,
    )
    from holdfast.registry.pytree.leaves import ArrayLeaf, NamedLeaf, by_path, paths_bytes
    from holdfast.registry.pytree.paths import Link, Trail, clip, component_path, segment
    from holdfast.registry.pytree.survey import (
        ARRAY_TAGS,
        array_paths,
        check_arrays,
        has_tags,
        leaf_kinds,
        leaf_paths,
        portable_kinds,
    )
    from holdfast.registry.pytree.tensor_bytes import TensorBytes, allocate_bytes, as_torch
    from holdfast.registry.pytree.traversal import is_array, rebuild, walk
    from holdfast.registry.pytree.unflattening import check_values, unflatten, unflatten_component
else:
    __getattr__ = at_first_use(__name__)
