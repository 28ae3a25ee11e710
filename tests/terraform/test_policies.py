"""The policies as documents: what they say where no server of the tests can tell."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.terraform.evaluation import Call, allowed
from tests.terraform.judges import (
    PLACEHOLDER,
    PREFIX,
    ROOT,
    Apply,
    Document,
    Judge,
    Policies,
    Terraform,
    client,
)

_ARN = f"arn:aws:s3:::{PLACEHOLDER}"
_HISTORY = {
    f"{_ARN}/team/{key}"
    for key in (
        f"runs/*/log/{'?' * 20}",
        "epochs/*",
        "sweeps/*",
        "notes/*",
        "signatures/*",
        "registry.json",
    )
}
_CREATE = {"Null": {"s3:if-none-match": "false"}}


def _statements(*documents: Document) -> dict[str, dict[str, Any]]:
    return {s["Sid"]: s for document in documents for s in document["Statement"]}


def test_there_is_a_policy_for_each_role(policies: Policies) -> None:
    assert set(policies.roles) == {"trainer", "evaluator", "annotator", "collector", "operator"}


def test_a_role_allows_and_the_bucket_forbids(policies: Policies) -> None:
    for document in policies.roles.values():
        assert document["Version"] == "2012-10-17"
        assert {statement["Effect"] for statement in document["Statement"]} == {"Allow"}
        assert not any("Principal" in statement for statement in document["Statement"])
        # What a managed policy of IAM may have.
        assert len(json.dumps(document)) < 6144
    assert {s["Effect"] for s in policies.bucket["Statement"]} == {"Deny"}
    assert {s["Principal"] for s in policies.bucket["Statement"]} == {"*"}


def test_no_role_has_a_wildcard_for_an_action(policies: Policies) -> None:
    actions = {a for s in _statements(*policies.roles.values()).values() for a in s["Action"]}
    assert actions == {
        "s3:ListBucket",
        "s3:GetBucketVersioning",
        "s3:GetObject",
        "s3:PutObject",
        "s3:DeleteObject",
        "s3:RestoreObject",
    }


def test_nothing_lies_outside_the_prefix(policies: Policies) -> None:
    for document in policies.roles.values():
        for sid, statement in _statements(document).items():
            if sid == "List":
                assert statement["Resource"] == [_ARN]
                assert statement["Condition"] == {"StringLike": {"s3:prefix": ["team/*"]}}
            elif sid == "Versioning":
                assert statement["Resource"] == [_ARN]
                assert statement["Action"] == ["s3:GetBucketVersioning"]
            else:
                assert all(arn.startswith(f"{_ARN}/team/") for arn in statement["Resource"])


def test_history_is_put_where_nothing_is(policies: Policies) -> None:
    """`s3:if-none-match` is a condition that moto does not know."""
    rights = _statements(*policies.roles.values())
    assert {sid for sid, s in rights.items() if s.get("Condition") == _CREATE} == {
        "Commit",
        "Condemn",
        "Init",
        "Sign",
    }
    named = {
        arn for sid in ("Commit", "Condemn", "Init", "Sign") for arn in rights[sid]["Resource"]
    }
    assert named == _HISTORY


@pytest.mark.parametrize(
    "key",
    [
        *("runs/a/log/00000000000000000000", "epochs/1", "sweeps/aa/1", "notes/1"),
        *("signatures/a/1", "registry.json"),
    ],
)
def test_no_role_by_itself_may_rewrite_history(policies: Policies, key: str) -> None:
    """On a bucket without the policy of this module, too."""
    arn, there = f"{_ARN}/team/{key}", {"aws:SecureTransport": "true"}
    for role, document in policies.roles.items():
        assert not allowed([document], Call("s3:PutObject", arn, there)), role
        assert not allowed([document], Call("s3:DeleteObject", arn, there)), role
    absent = {**there, "s3:if-none-match": "*"}
    assert any(
        allowed([d, policies.bucket], Call("s3:PutObject", arn, absent))
        for d in policies.roles.values()
    )


def test_the_bucket_forbids_what_nobody_may(policies: Policies) -> None:
    """`aws:SecureTransport` is a condition that moto does not know."""
    tls, stays, same, *_ = policies.bucket["Statement"]
    assert tls["Action"] == ["s3:*"]
    assert tls["Resource"] == [_ARN, f"{_ARN}/*"]
    assert tls["Condition"] == {"Bool": {"aws:SecureTransport": "false"}}
    assert stays["Action"] == ["s3:DeleteObject", "s3:DeleteObjectVersion"]
    assert "Condition" not in stays
    assert same["Action"] == ["s3:PutObject"]
    assert same["Condition"] == {"Null": {"s3:if-none-match": "true"}}
    assert set(stays["Resource"]) == set(same["Resource"]) == _HISTORY


def test_a_team_writes_to_its_own_runs_alone(apply: Apply, policies: Policies) -> None:
    given = apply(bucket=PLACEHOLDER, prefix="team", teams=["vision", "speech"])
    assert set(given.roles) == {
        *policies.roles,
        *(f"{role}-{team}" for role in ("trainer", "annotator") for team in ("vision", "speech")),
    }
    assert {role: given.roles[role] for role in policies.roles} == policies.roles
    absent = {"aws:SecureTransport": "true", "s3:if-none-match": "*"}
    own = ("vision-a", "vision-", "vision-speech-a")
    others = ("vision", "speech-a", "a", "visionary-a", "a-vision-b")
    for role in ("trainer", "annotator"):
        documents = [given.roles[f"{role}-vision"], given.bucket]
        for kind, run in itertools.product(
            ("log", "snapshots", "active", "signatures"), (*own, *others)
        ):
            arn = f"{_ARN}/team/runs/{run}/{kind}/{'0' * 20}"
            if kind == "active":
                arn = f"{_ARN}/team/active/{run}.7"
            if kind == "signatures":
                arn = f"{_ARN}/team/signatures/{run}/{'0' * 20}.{'0' * 64}"
            assert allowed(documents, Call("s3:PutObject", arn, absent)) == (run in own), arn
            assert allowed(documents, Call("s3:GetObject", arn, absent))
            assert not allowed(documents, Call("s3:DeleteObject", arn, absent))
        pack = Call("s3:PutObject", f"{_ARN}/team/packs/aa/b.0", absent)
        assert allowed(documents, pack) == (role == "trainer")


def test_packs_with_tags_take_a_right_that_is_off_by_default(
    apply: Apply, guard_judge: Judge
) -> None:
    """The right covers packs only, and only the roles that put packs get it."""
    off = apply(bucket=PLACEHOLDER, prefix="team", teams=["vision"])
    on = apply(bucket=PLACEHOLDER, prefix="team", teams=["vision"], tags_packs=True)
    added = {
        name: [one for one in document["Statement"] if one not in off.roles[name]["Statement"]]
        for name, document in on.roles.items()
    }
    packs = [f"{_ARN}/team/packs/*"]
    tag = {
        "Sid": "Tag",
        "Effect": "Allow",
        "Action": ["s3:PutObjectTagging"],
        "Resource": packs,
    }
    see = {**tag, "Sid": "SeeTags", "Action": ["s3:GetObjectTagging"]}
    expected = {"trainer": [tag], "trainer-vision": [tag], "collector": [tag, see]}
    assert {name: some for name, some in added.items() if some} == expected
    assert on.bucket == off.bucket
    worlds = {may: guard_judge.world(policies) for may, policies in ((False, off), (True, on))}
    for role, (has_right, key) in itertools.product(
        ("trainer", "collector", "trainer-vision"),
        ((False, "packs/aa/b.0"), (True, "packs/aa/b.0"), (True, "manifests/aa/b.0")),
    ):
        world = worlds[has_right]
        named = {"Bucket": world.bucket, "Key": f"{PREFIX}/{key}"}
        s3 = client(world.roles[role])
        if has_right and key.startswith("packs/"):
            s3.put_object(**named, Body=b"x", Tagging="team=vision")
            assert client(world.owner).get_object_tagging(**named)["TagSet"]
        else:
            with pytest.raises(ClientError, match="AccessDenied"):
                s3.put_object(**named, Body=b"x", Tagging="team=vision")
            s3.put_object(**named, Body=b"x")


def test_without_a_prefix_the_whole_bucket_is_the_registry(apply: Apply) -> None:
    policies = apply(bucket=PLACEHOLDER)
    rights = _statements(*policies.roles.values())
    assert "Condition" not in rights["List"]
    assert rights["Read"]["Resource"] == [f"{_ARN}/*"]
    assert rights["Init"]["Resource"] == [f"{_ARN}/registry.json"]
    assert policies.bucket["Statement"][1]["Resource"][0] == f"{_ARN}/runs/*/log/{'?' * 20}"


def test_with_a_key_readers_decrypt_and_writers_encrypt(apply: Apply) -> None:
    """No server of the tests knows KMS."""
    key = "arn:aws-cn:kms:cn-north-1:123456789012:key/1"
    policies = apply(bucket=PLACEHOLDER, prefix="a/b", kms_key_arn=key, partition="aws-cn")
    for role, document in policies.roles.items():
        rights = _statements(document)
        assert rights["Decrypt"]["Resource"] == [key]
        assert rights["Decrypt"]["Action"] == ["kms:Decrypt"]
        assert ("Encrypt" in rights) == (role != "evaluator")
        assert rights["Read"]["Resource"] == [f"arn:aws-cn:s3:::{PLACEHOLDER}/a/b/*"]
    assert rights["Encrypt"]["Action"] == ["kms:GenerateDataKey"]
    # A bucket's policy knows no actions of other services.
    assert all(a.startswith("s3:") for s in policies.bucket["Statement"] for a in s["Action"])


_SSE = "s3:x-amz-server-side-encryption"
_OURS, _FOREIGN = (f"arn:aws:kms:eu-central-1:{n * 12}:key/1" for n in "12")


@pytest.mark.parametrize("key", [None, _OURS])
def test_nobody_puts_what_the_others_cannot_read(apply: Apply, key: str | None) -> None:
    """By a key of the client, or by a KMS key that is not the bucket's."""
    given = {"kms_key_arn": key} if key else {}
    policies = apply(bucket=PLACEHOLDER, prefix="team", **given)
    there = {"aws:SecureTransport": "true", "s3:if-none-match": "*"}
    asked: dict[tuple[tuple[str, str], ...], bool] = {
        (): True,
        ((f"{_SSE}-customer-algorithm", "AES256"),): False,
        ((_SSE, "AES256"),): key is None,
        ((_SSE, "aws:kms"),): False,
        ((_SSE, "aws:kms:dsse"), (f"{_SSE}-aws-kms-key-id", _OURS)): False,
        ((_SSE, "aws:kms"), (f"{_SSE}-aws-kms-key-id", _OURS)): key is not None,
        ((_SSE, "aws:kms"), (f"{_SSE}-aws-kms-key-id", _FOREIGN)): False,
        ((f"{_SSE}-aws-kms-key-id", _FOREIGN),): False,
    }
    for headers, may in asked.items():
        for name in ("packs/aa/x.0", f"runs/a/log/{0:020d}", "runs/a/snapshots/" + "9" * 20):
            call = Call("s3:PutObject", f"{_ARN}/team/{name}", {**there, **dict(headers)})
            assert allowed([policies.roles["trainer"], policies.bucket], call) == may, headers


def test_the_policy_of_the_guide_is_that_of_a_trainer(apply: Apply) -> None:
    text = (ROOT / "docs/guides/operator.md").read_text()
    shown = json.loads(text.partition("<!-- iam -->\n```json\n")[2].partition("```")[0])
    assert shown == apply(bucket="my-bucket", prefix="team").roles["trainer"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("prefix", value) for value in ("/team", "team/", "a//b", "te*m", "a?", "${aws:userid}")),
        *(("bucket", value) for value in ("ab", "Upper", "a*b", "a/b", "-ab")),
    ],
)
def test_what_would_open_more_is_refused(
    terraform: Terraform, tmp_path: Path, name: str, value: str
) -> None:
    (tmp_path / "main.tf").write_text(
        f'module "policies" {{\n  source = "{ROOT}/terraform/policies"\n'
        f"  bucket = {_quoted(value if name == 'bucket' else PLACEHOLDER)}\n"
        f"  prefix = {_quoted(value if name == 'prefix' else 'team')}\n}}\n"
    )
    assert terraform("init", "-input=false", cwd=tmp_path).returncode == 0
    done = terraform("plan", "-input=false", cwd=tmp_path)
    assert done.returncode == 1
    assert "Invalid value for variable" in done.stdout


def _quoted(text: str) -> str:
    return json.dumps(text).replace("${", "$${")


# The evaluation that the guard judges by


def _document(effect: str, action: str, resource: str, condition: object = None) -> Document:
    statement = {"Effect": effect, "Action": [action], "Resource": [resource]}
    return {"Statement": [{**statement, **({"Condition": condition} if condition else {})}]}


def test_deny_beats_allow_and_nothing_is_allowed_by_itself() -> None:
    allow = _document("Allow", "s3:Get*", "a/*")
    deny = _document("Deny", "s3:*", "a/secret")
    assert allowed([allow, deny], Call("s3:GetObject", "a/b/c"))
    assert not allowed([allow, deny], Call("s3:GetObject", "a/secret"))
    assert not allowed([allow, deny], Call("s3:PutObject", "a/b"))
    assert not allowed([allow], Call("s3:GetObject", "b/a/"))
    assert not allowed([], Call("s3:GetObject", "a"))


@pytest.mark.parametrize(
    ("condition", "context", "holds"),
    [
        ({"Null": {"k": "false"}}, {"k": "*"}, True),
        ({"Null": {"k": "false"}}, {}, False),
        ({"Null": {"k": "true"}}, {"k": "*"}, False),
        ({"Null": {"k": "true"}}, {}, True),
        ({"Bool": {"k": "false"}}, {"k": "false"}, True),
        ({"Bool": {"k": "false"}}, {"k": "true"}, False),
        ({"StringNotEquals": {"k": ["a", "b"]}}, {"k": "b"}, False),
        ({"StringNotEquals": {"k": ["a", "b"]}}, {"k": "c"}, True),
        ({"StringNotEquals": {"k": ["a"]}}, {}, True),
        ({"StringLike": {"k": ["team/*"]}}, {"k": "team/"}, True),
        ({"StringLike": {"k": ["team/*"]}}, {"k": "team"}, False),
        ({"StringLike": {"k": ["team/*"]}}, {}, False),
        ({"StringLike": {"k": ["*"]}, "Null": {"l": "true"}}, {"k": "", "l": ""}, False),
    ],
)
def test_a_condition(condition: object, context: dict[str, str], holds: bool) -> None:
    for effect, other in itertools.product(("Allow", "Deny"), ([], ["x"])):
        documents = [_document(effect, "s3:A", "r", condition)]
        documents += [_document("Allow", "s3:A", "r") for _ in other]
        expected = (
            holds
            if effect == "Allow" and not other
            else bool(other) and (effect == "Allow" or not holds)
        )
        assert allowed(documents, Call("s3:A", "r", context)) == expected


def test_what_the_evaluation_does_not_know_it_does_not_pass_over() -> None:
    call = Call("s3:A", "r", {"k": "v"})
    for document in (
        _document("Allow", "s3:A", "r", {"StringEquals": {"k": "v"}}),
        {"Statement": [{"Effect": "Allow", "NotAction": ["s3:B"], "Resource": ["r"]}]},
        {"Statement": [{"Effect": "Allow", "Action": ["s3:A"], "Principal": {"AWS": "x"}}]},
    ):
        with pytest.raises(NotImplementedError):
            allowed([document], call)
