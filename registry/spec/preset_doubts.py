"""Settings of a run that are legal and may be mistakes."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.registry.spec.run_spec import RunSpec
from holdfast.registry.values import near


def doubts(spec: RunSpec) -> Iterator[str]:
    """Yield warnings of settings that are allowed, but may be mistakes."""
    required = [*spec.required_keys, *(key for one in spec.phases for key in one.required_keys)]
    named = {name.strip() for key in required for name in key.split("|")}
    patterns = [("finite", path) for path in spec.finite]
    patterns += [("dtypes", rule.path) for rule in spec.dtypes]
    for field, path in patterns:
        key, slash, _ = path.partition("/")
        if not slash and "*" not in key and (field, f"{key}/*") not in patterns:
            yield f"{field}: {path!r} matches no path below this key; {f'{path}/*'!r} does"
        yield from _unrequired(field, key, named)
    for field, keys in (("required_keys", named), ("inference", spec.inference)):
        for key in sorted(keys):
            if "/" in key or "*" in key:
                yield f"{field}: {key!r} is a pattern, and top-level keys are meant"
            elif field == "inference":
                yield from _unrequired(field, key, named)


def _unrequired(field: str, key: str, named: set[str]) -> Iterator[str]:
    if named and named.isdisjoint(one.strip() for one in key.split("|")) and "*" not in key:
        meant = near(key, named)
        more = f". {meant}" if meant else ""
        yield f"{field}: no state must have {key!r}, which required_keys leave out{more}"
