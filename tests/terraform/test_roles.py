"""Role by operation: what the table says is what two servers do.

What this cannot tell: whether AWS reads the policies as they do. moto (`judges.MotoJudge`) ignores
conditions, so what hangs on `s3:if-none-match`, `s3:prefix` or `aws:SecureTransport` is left to the
guard, which is ours. Neither knows KMS. The guard judges all roles in every run; moto those that
may write objects or delete them, or whom the bucket alone stops, and the others in a soak.
"""

from __future__ import annotations

import pytest
from botocore.exceptions import ClientError

from tests.terraform.judges import ADMINISTRATOR, Judge, Policies, World
from tests.terraform.operations import OPERATIONS, ROLES, Operation

_BY_MOTO = ("trainer", "collector", ADMINISTRATOR)
_CASES = [
    pytest.param(
        judge,
        role,
        operation,
        id=f"{judge}-{role}-{operation.name}",
        marks=() if judge == "guard" or role in _BY_MOTO else pytest.mark.soak,
    )
    for judge in ("moto", "guard")
    for role in ROLES
    for operation in OPERATIONS
    if judge == "guard" or not operation.conditional
]


@pytest.mark.parametrize(("judge", "role", "operation"), _CASES, indirect=["judge"])
def test_a_role_may_do_what_the_table_says_and_nothing_else(
    judge: Judge, role: str, operation: Operation, shared_world: World, policies: Policies
) -> None:
    # What is refused spoils nothing.
    spoils = operation.spoils and operation.may(role)
    world = judge.world(policies) if spoils else shared_world
    for attempt in operation.attempts(world, role):
        if operation.may(role):
            attempt()
        else:
            with pytest.raises(ClientError) as refusal:
                attempt()
            assert refusal.value.response["ResponseMetadata"]["HTTPStatusCode"] == 403
