"""Values that every other room is built from. No store, no run, no state.

- `digest`: a SHA-256 as a type of its own; `canonical`: the one byte string of a JSON value.
- `records`: the base class of every record on a store: frozen, closed, canonical.
- `parse_limits`: bounds the memory that parsing a record from a store may take.
- `dtypes`: the closed list of element types; `semver`: versions of releases.
- `amounts`: sizes, numbers, times and near names as people read them, and a caller's numbers.
- `markup`: facts and tables as HTML.
- `environment`, `process`: the versions and the host of a run, and this process.
- `figures`: what this process has done, as metrics.
- `filters`: rows that fit a condition that a person types.
- `first_use`, `renamed`: late imports, and a collector that pauses meanwhile; old public names.

`canonical`, `dtypes`, `digest` and `records` decide bytes and ids: they do not change. Specified in
docs/spec.md, section 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.registry.values.first_use import at_first_use

if TYPE_CHECKING:
    from holdfast.backends.limits import max_record_bytes
    from holdfast.registry.values.amounts import (
        abridged,
        age,
        counted,
        duration,
        metrics,
        near,
        number,
        one_of,
        seconds,
        share,
        size,
        unknown,
        whole,
    )
    from holdfast.registry.values.canonical import MAX_INTEGER, Json, float_from_hex, float_to_hex
    from holdfast.registry.values.digest import DIGEST_BYTES, Digest, Digests, HexDigests
    from holdfast.registry.values.dtypes import FLOATING, ITEM_SIZES, PrecisionName, item_size
    from holdfast.registry.values.environment import describe_environment
    from holdfast.registry.values.figures import HERE, METRICS, Figures
    from holdfast.registry.values.filters import Filter
    from holdfast.registry.values.first_use import collector_paused
    from holdfast.registry.values.markup import text
    from holdfast.registry.values.parse_limits import (
        CHARACTER_BYTES,
        HEAVIEST,
        LISTED_BYTES,
        MOST_EQUAL,
        PATH_BYTES,
        ROW_BYTES,
        Budget,
        KeyHashes,
        check_bytes,
        check_json,
        json_bytes,
        taking_turns,
    )
    from holdfast.registry.values.path_names import check_path_name, check_path_names
    from holdfast.registry.values.process import (
        ProcessLock,
        as_author,
        author,
        cores,
        host_name,
        is_first_rank,
        require_first_rank,
    )
    from holdfast.registry.values.records import (
        DigestField,
        Field,
        FloatField,
        InvalidRecord,
        Metrics,
        Name,
        NumberField,
        PhaseName,
        Plain,
        Record,
        Spelled,
        Step,
        Tagged,
        empty,
        read_as,
    )
    from holdfast.registry.values.renamed import Renamed, renamed_arguments, renaming
    from holdfast.registry.values.semver import release_version
else:
    __getattr__ = at_first_use(__name__)
