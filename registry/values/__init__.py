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
    from holdfast.backends.limits import max_record_bytes as max_record_bytes
    from holdfast.registry.values.amounts import abridged as abridged
    from holdfast.registry.values.amounts import age as age
    from holdfast.registry.values.amounts import counted as counted
    from holdfast.registry.values.amounts import duration as duration
    from holdfast.registry.values.amounts import metrics as metrics
    from holdfast.registry.values.amounts import near as near
    from holdfast.registry.values.amounts import number as number
    from holdfast.registry.values.amounts import share as share
    from holdfast.registry.values.amounts import size as size
    from holdfast.registry.values.amounts import whole as whole
    from holdfast.registry.values.canonical import MAX_INTEGER as MAX_INTEGER
    from holdfast.registry.values.canonical import Json as Json
    from holdfast.registry.values.canonical import float_from_hex as float_from_hex
    from holdfast.registry.values.canonical import float_to_hex as float_to_hex
    from holdfast.registry.values.digest import DIGEST_BYTES as DIGEST_BYTES
    from holdfast.registry.values.digest import Digest as Digest
    from holdfast.registry.values.digest import Digests as Digests
    from holdfast.registry.values.digest import HexDigests as HexDigests
    from holdfast.registry.values.dtypes import FLOATING as FLOATING
    from holdfast.registry.values.dtypes import ITEM_SIZES as ITEM_SIZES
    from holdfast.registry.values.dtypes import PrecisionName as PrecisionName
    from holdfast.registry.values.dtypes import item_size as item_size
    from holdfast.registry.values.environment import describe_environment as describe_environment
    from holdfast.registry.values.figures import HERE as HERE
    from holdfast.registry.values.figures import METRICS as METRICS
    from holdfast.registry.values.figures import Figures as Figures
    from holdfast.registry.values.filters import Filter as Filter
    from holdfast.registry.values.first_use import collector_paused as collector_paused
    from holdfast.registry.values.markup import text as text
    from holdfast.registry.values.parse_limits import CHARACTER_BYTES as CHARACTER_BYTES
    from holdfast.registry.values.parse_limits import HEAVIEST as HEAVIEST
    from holdfast.registry.values.parse_limits import LISTED_BYTES as LISTED_BYTES
    from holdfast.registry.values.parse_limits import MOST_EQUAL as MOST_EQUAL
    from holdfast.registry.values.parse_limits import PATH_BYTES as PATH_BYTES
    from holdfast.registry.values.parse_limits import ROW_BYTES as ROW_BYTES
    from holdfast.registry.values.parse_limits import Budget as Budget
    from holdfast.registry.values.parse_limits import KeyHashes as KeyHashes
    from holdfast.registry.values.parse_limits import check_bytes as check_bytes
    from holdfast.registry.values.parse_limits import check_json as check_json
    from holdfast.registry.values.parse_limits import json_bytes as json_bytes
    from holdfast.registry.values.parse_limits import taking_turns as taking_turns
    from holdfast.registry.values.path_names import check_path_name as check_path_name
    from holdfast.registry.values.path_names import check_path_names as check_path_names
    from holdfast.registry.values.process import ProcessLock as ProcessLock
    from holdfast.registry.values.process import as_author as as_author
    from holdfast.registry.values.process import author as author
    from holdfast.registry.values.process import cores as cores
    from holdfast.registry.values.process import host_name as host_name
    from holdfast.registry.values.process import is_first_rank as is_first_rank
    from holdfast.registry.values.process import require_first_rank as require_first_rank
    from holdfast.registry.values.records import DigestField as DigestField
    from holdfast.registry.values.records import Field as Field
    from holdfast.registry.values.records import FloatField as FloatField
    from holdfast.registry.values.records import InvalidRecord as InvalidRecord
    from holdfast.registry.values.records import Metrics as Metrics
    from holdfast.registry.values.records import Name as Name
    from holdfast.registry.values.records import NumberField as NumberField
    from holdfast.registry.values.records import PhaseName as PhaseName
    from holdfast.registry.values.records import Plain as Plain
    from holdfast.registry.values.records import Record as Record
    from holdfast.registry.values.records import Spelled as Spelled
    from holdfast.registry.values.records import Step as Step
    from holdfast.registry.values.records import Tagged as Tagged
    from holdfast.registry.values.records import empty as empty
    from holdfast.registry.values.records import read_as as read_as
    from holdfast.registry.values.renamed import Renamed as Renamed
    from holdfast.registry.values.renamed import renamed_arguments as renamed_arguments
    from holdfast.registry.values.renamed import renaming as renaming
    from holdfast.registry.values.semver import release_version as release_version
else:
    __getattr__ = at_first_use(__name__)
