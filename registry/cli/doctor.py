"""`doctor`: check whether a registry can be used, here and now."""

from __future__ import annotations

from dataclasses import asdict

from holdfast.backends.limits import VARIABLE as MAX_RECORD
from holdfast.backends.local.mounts import ALLOW
from holdfast.backends.patience import LEAST_RATE, TIMEOUT
from holdfast.registry.cli import output
from holdfast.registry.cli.command import Answer, command
from holdfast.registry.cli.wording import in_commands
from holdfast.registry.errors import StoreUnsuitable
from holdfast.registry.maintenance.checkup import Check, checks
from holdfast.registry.storage.address import Address
from holdfast.registry.storage.chunk_cache import BYTES_VARIABLE, FOLDER_VARIABLE
from holdfast.registry.storage.heads import MEMORY
from holdfast.registry.training.pending import EXIT_WAIT

_VARIABLES = (
    *("HOLDFAST_RUN", FOLDER_VARIABLE, BYTES_VARIABLE, MAX_RECORD, ALLOW, EXIT_WAIT, MEMORY),
    *(TIMEOUT, LEAST_RATE),
    *("AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_REGION"),
)


@command()
def doctor(*, address: Address, json: bool) -> Answer:
    """Check whether a registry can be used.

    Prints one line for each check. The exit status is 8 if one fails.
    """
    found: list[Check] = []
    for check in checks(address, _VARIABLES):
        found.append(check)
        if not json:
            output.hanging(f"{check.status:4}  {check.name:12}  ", in_commands(check.message))
    ok = all(check.status != "fail" for check in found)
    return Answer(
        lambda: {"ok": ok, "checks": [asdict(check) for check in found]},
        lambda: (),
        status=0 if ok else StoreUnsuitable.exit_code,
    )
