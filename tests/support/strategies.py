"""Hypothesis strategies that several tests share: canonical JSON, digests, keys, shapes."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

from holdfast.registry.objects.keys import KINDS, ObjectKey
from holdfast.registry.values.canonical import MAX_INTEGER
from holdfast.registry.values.digest import Digest
from holdfast.registry.values.dtypes import ITEM_SIZES

#: By how much the numbers of examples in the tests are multiplied; `scripts/soak` tries far more.
_TIMES = float(os.environ.get("HOLDFAST_EXAMPLES", "0.3"))


def examples(number: int, **more: Any) -> settings:
    """Return settings that try about this many examples; no clock decides over a test here."""
    return settings(deadline=None, max_examples=max(1, int(number * _TIMES)), **more)


quick = examples(60)

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
json_integers = st.integers(-MAX_INTEGER, MAX_INTEGER)
json_values = st.recursive(
    st.none() | st.booleans() | json_integers | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)

digests = st.binary(min_size=32, max_size=32).map(Digest)
generations = st.integers(0, 10**6)
object_keys = st.builds(ObjectKey, st.sampled_from(KINDS), digests, generations)
pack_keys = st.builds(ObjectKey, st.just("packs"), digests, generations)

dtypes = st.sampled_from(sorted(ITEM_SIZES))
shapes = st.lists(st.integers(0, 9) | st.just(1), max_size=5).map(tuple)
