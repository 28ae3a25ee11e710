"""The workers of a Dask cluster, for commands that read or write much."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager

from holdfast.registry.cli.options import option
from holdfast.registry.errors import InvalidInput, WorkersFailed

DASK = option(
    "--dask", "ADDRESS", "Let the workers of a Dask cluster do it, such as tcp://HOST:8786."
)

_ANSWERS_WITHIN_S = 10


@contextmanager
def workers_at(address: str | None) -> Iterator[Executor | None]:
    """Connect to a Dask scheduler while the block runs; without an address there is no executor.

    Raises:
        InvalidInput: Dask is not installed, or this is no address.
        WorkersFailed: No scheduler answers there.
    """
    if address is None:
        yield None
        return
    try:
        from distributed import Client
        from distributed.comm import get_address_host_port
    except ModuleNotFoundError as error:
        if error.name != "distributed":
            raise
        raise InvalidInput(
            "Dask is not installed",
            where="--dask",
            hint="Install the extra: pip install 'holdfast[dask]'.",
        ) from error
    hint = "`dask scheduler` prints the address to give here."
    try:
        get_address_host_port(address)  # a client of a wrong address would wait for it at its end
        client = Client(address, set_as_default=False, timeout=_ANSWERS_WITHIN_S)
    except ValueError as error:
        raise InvalidInput(
            "not an address", where="--dask", expected="tcp://HOST:PORT", found=address, hint=hint
        ) from error
    except OSError as error:
        raise WorkersFailed(
            "no scheduler of Dask answers", where=f"--dask {address}", found=error, hint=hint
        ) from error
    with client:
        yield client.get_executor()
