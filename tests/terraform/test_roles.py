"""Role by operation: what the table says is what two servers do.

What this cannot tell: whether AWS reads the policies as they do. moto (`judges.MotoJudge`) ignores
conditions, so what hangs on `s3:if-none-match`, `s3:prefix` or `aws:SecureTransport` is left to the
guard, which is ours. Neither knows KMS.
"""

from __future__ import annotations

import pytest
from botocore.exceptions import ClientError

from tests.terraform.judges import Judge, Policies, World
from tests.terraform.operations import OPERATIONS, ROLES, Operation

_CASES = [
    pytest.param(judge, role, operation, id=f"{judge}-{role}-{operation.name}")
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
