"""What the guides show beyond their snippets: a job that is requeued, the rights of a trainer."""

from __future__ import annotations

import json
import os
import secrets
import signal
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast
from tests.support.pages import ROOT, Block, blocks, readers_own, run_python, run_sh
from tests.terraform.judges import for_moto

_CLUSTER = ROOT / "docs" / "guides" / "cluster.md"
_OPERATOR = ROOT / "docs" / "guides" / "operator.md"


def test_a_requeued_job_goes_on(newcomer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop for clusters: warned in mid-run, it saves and leaves; started again, it ends."""
    monkeypatch.setenv("HOLDFAST_REGISTRY", "checkpoints")
    monkeypatch.setenv("HOLDFAST_RUN", "pretrain-7")
    with holdfast.init("checkpoints") as reg:
        (block,) = [block for block in blocks(_CLUSTER) if "checkpointer.step" in block.text]
        names = readers_own()
        train_step = names["train_step"]

        def warned_at_150(step: int) -> float:
            if step == 150:
                signal.raise_signal(signal.SIGTERM)
            return float(train_step(step))

        with pytest.raises(SystemExit, match="143"):
            run_python(_CLUSTER, block, {**names, "train_step": warned_at_150})
        run = reg.run("pretrain-7")
        assert (run.status, [ck.step for ck in run.checkpoints()]) == ("interrupted", [100, 150])
        run_python(_CLUSTER, block, names)
        run.refresh()
        assert (run.status, [ck.step for ck in run.checkpoints()]) == (
            "completed",
            [100, 150, 200, 300],
        )


Become = Callable[[list[dict[str, Any]]], None]


@pytest.fixture
def become(moto_server: Any, moto_url: object, monkeypatch: pytest.MonkeyPatch) -> Iterator[Become]:
    """Become a user with nothing but some statements, on a server that checks them."""
    import boto3

    user = f"trainer-{secrets.token_hex(4)}"
    session = boto3.session.Session()
    iam = session.client("iam")
    iam.create_user(UserName=user)
    key = iam.create_access_key(UserName=user)["AccessKey"]
    session.client("s3").create_bucket(Bucket=user)

    def check_from_call(number: bytes) -> None:
        address = f"{moto_server.endpoint_url}/moto-api/reset-auth"
        request = urllib.request.Request(address, number, {"Content-Type": "text/plain"})
        urllib.request.urlopen(request).close()

    def switch(statements: list[dict[str, Any]]) -> None:
        policy = json.dumps({"Version": "2012-10-17", "Statement": statements})
        check_from_call(b"inf")
        iam.put_user_policy(
            UserName=user,
            PolicyName="guide",
            PolicyDocument=for_moto(policy).replace("my-bucket", user),
        )
        check_from_call(b"0")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", key["AccessKeyId"])
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", key["SecretAccessKey"])
        monkeypatch.setenv("GUARDED", f"s3://{user}")

    yield switch
    check_from_call(b"inf")


_ALL = [{"Effect": "Allow", "Action": ["s3:*"], "Resource": ["*"]}]


def _statements() -> list[dict[str, Any]]:
    (block,) = [block for block in blocks(_OPERATOR) if block.mark == "iam"]
    found: list[dict[str, Any]] = json.loads(block.text)["Statement"]
    return found


def test_the_policy_is_enough(
    newcomer: Path, become: Become, monkeypatch: pytest.MonkeyPatch
) -> None:
    become(_ALL)
    holdfast.init(os.environ["GUARDED"] + "/team").close()
    become(_statements())
    with holdfast.open(os.environ["GUARDED"] + "/team") as reg:
        run = reg.create_run("a")
        ck = run.save({"model": {"weight": bytes(100_000)}}, step=1)
        ck.report({"loss": 1.0})
        assert run.restore() is not None
        assert reg.verify(deep=True).findings == ()
    run_sh(_OPERATOR, Block("", "sh", "holdfast run ls -r $GUARDED/team", 0), monkeypatch)
    for place in ("/team/inner", "/other"):
        with pytest.raises(holdfast.RegistryError, match="access is denied"):
            holdfast.init(os.environ["GUARDED"] + place)


def test_the_policy_is_not_more_than_enough(newcomer: Path, become: Become) -> None:
    statements = _statements()
    become(_ALL)
    with holdfast.init(os.environ["GUARDED"] + "/team") as reg:
        reg.create_run("a").save({"model": {"weight": bytes(100_000)}}, step=1)
    for number in range(4):  # a save of one step needs no snapshot
        become(statements[:number] + statements[number + 1 :])
        with pytest.raises(holdfast.RegistryError, match="access is denied"):
            holdfast.open(os.environ["GUARDED"] + "/team").create_run(f"b-{number}").save(
                {"model": {"weight": bytes(200_000 + number)}}, step=1
            )
    become(statements[:2])
    with holdfast.open(os.environ["GUARDED"] + "/team", read_only=True) as reg:
        assert reg.checkpoint("a/latest").load() == {"model": {"weight": bytes(100_000)}}
