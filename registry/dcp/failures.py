"""The errors of Holdfast out of those of DCP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.checkpoint.api import CheckpointException

from holdfast.registry.errors import RegistryError


@contextmanager
def typed_errors() -> Iterator[None]:
    """Raise the error of Holdfast that a `CheckpointException` of DCP has in it.

    DCP collects the errors of all ranks in one of its own, which is no `Exception`. Errors that are
    none of Holdfast's stay as they are.

    ```python
    with typed_errors():
        dcp.load(state, storage_reader=HoldfastReader(checkpoint))
    ```

    Raises:
        RegistryError: The error of the lowest rank that has one.
    """
    try:
        yield
    except CheckpointException as collected:
        for _, (error, _) in sorted(collected.failures.items()):
            if isinstance(error, RegistryError):
                raise error from collected
        raise
