"""Role by operation: what the table says is what two servers do.

What this cannot tell: whether AWS reads the policies as they do. moto (`judges.MotoJudge`) ignores
conditions, so what hangs on `s3:if-none-match`, `s3:prefix` or `aws:SecureTransport` is left to the
guard, which is ours. Neither knows KMS. The guard judges all roles in every run; moto those that
may write objects or delete them, or whom the bucket alone stops, and the others in a soak.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from botocore.exceptions import ClientError

from tests.terraform.judges import ADMINISTRATOR, Judge, Policies
from tests.terraform.operations import OPERATIONS, ROLES

if TYPE_CHECKING:
    from collections.abc import Callable

_BY_MOTO = ("trainer", "collector", ADMINISTRATOR)
_CASES = [
    pytest.param(
        f"{judge}_judge",
        role,
        id=f"{judge}-{role}",
        marks=() if judge == "guard" or role in _BY_MOTO else pytest.mark.soak,
    )
    for judge in ("moto", "guard")
    for role in ROLES
]


@pytest.mark.parametrize(("name", "role"), _CASES)
def test_a_role_may_do_what_the_table_says_and_nothing_else(
    name: str, role: str, policies: Policies, request: pytest.FixtureRequest
) -> None:
    judge: Judge = request.getfixturevalue(name)
    shared = judge.world(policies)
    for operation in OPERATIONS:
        if operation.conditional and name == "moto_judge":
            continue
        # What is refused spoils nothing.
        spoils = operation.spoils and operation.may(role)
        world = judge.world(policies) if spoils else shared
        for attempt in operation.attempts(world, role):
            assert _refusal(attempt) == (None if operation.may(role) else 403), operation.name


def _refusal(attempt: Callable[[], None]) -> int | None:
    """Return the status of the answer to an attempt that is refused."""
    try:
        attempt()
    except ClientError as error:
        return int(error.response["ResponseMetadata"]["HTTPStatusCode"])
    return None
