"""Two servers that hold requests against policies, each in its own way, and both incompletely.

`MotoJudge` is moto with its IAM on: code of others, which ignores every condition. An Allow with a
condition allows always there, and a Deny with one would deny always; so it gets the bucket policy
without the latter. `GuardJudge` knows the conditions, by an evaluation of ours.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from tests.servers.fixtures import S3Server

_ROOT = Path(__file__).parents[2]
#: What stands for the bucket in the policies that were applied.
PLACEHOLDER = "bucket-of-the-tests"
PREFIX = "team"
#: Beside the roles of the module: somebody whom only the bucket policy stops.
ADMINISTRATOR = "administrator"
_EVERYTHING = {
    "Version": "2012-10-17",
    "Statement": [{"Effect": "Allow", "Action": ["s3:*"], "Resource": ["*"]}],
}

Document = dict[str, Any]


@dataclass(frozen=True)
class Policies:
    """What the module gives: the documents of the roles and that of the bucket."""

    roles: Mapping[str, Document]
    bucket: Document

    def of(self, bucket: str) -> Policies:
        """Return them for a bucket of this name."""
        text = json.dumps([{**self.roles, ADMINISTRATOR: _EVERYTHING}, self.bucket])
        return Policies(*json.loads(text.replace(PLACEHOLDER, bucket)))


@dataclass(frozen=True)
class World:
    """A bucket, and for every role a server that knows its user.

    Attributes:
        owner: One who is not held against any policy.
    """

    bucket: str
    roles: Mapping[str, S3Server]
    owner: S3Server

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/{PREFIX}"


class Judge(Protocol):
    """A server that judges."""

    def world(self, policies: Policies) -> World: ...


class MotoJudge:
    def __init__(self, endpoint_url: str) -> None:
        self._root = S3Server(endpoint_url, "test", "test")
        self._owner = self._user("owner", {**_EVERYTHING, "Statement": [_allow("*")]})
        _send(f"{endpoint_url}/moto-api/reset-auth", b"0", "POST")

    def world(self, policies: Policies) -> World:
        bucket = f"moto-{secrets.token_hex(6)}"
        found = policies.of(bucket)
        s3 = client(self._owner)
        s3.create_bucket(Bucket=bucket)
        guards = for_moto(json.dumps(unconditional(found.bucket)))
        s3.put_bucket_policy(Bucket=bucket, Policy=guards)
        roles = {
            role: self._user(f"{bucket}-{role}", document) for role, document in found.roles.items()
        }
        return World(bucket, roles, self._owner)

    def _user(self, name: str, document: Document) -> S3Server:
        iam = client(getattr(self, "_owner", self._root), "iam")
        iam.create_user(UserName=name)
        text = for_moto(json.dumps(document))
        iam.put_user_policy(UserName=name, PolicyName="policy", PolicyDocument=text)
        key = iam.create_access_key(UserName=name)["AccessKey"]
        return S3Server(self._root.endpoint_url, key["AccessKeyId"], key["SecretAccessKey"])


class GuardJudge:
    def __init__(self, endpoint_url: str) -> None:
        self._owner = S3Server(endpoint_url, "test", "test")

    def world(self, policies: Policies) -> World:
        bucket = f"guard-{secrets.token_hex(6)}"
        found = policies.of(bucket)
        client(self._owner).create_bucket(Bucket=bucket)
        roles = {}
        for role, document in found.roles.items():
            key = f"AKIA{secrets.token_hex(8).upper()}"
            address = f"{self._owner.endpoint_url}/guard/{key}"
            _send(address, json.dumps([document, found.bucket]).encode(), "PUT")
            roles[role] = S3Server(self._owner.endpoint_url, key, "secret")
        return World(bucket, roles, self._owner)


def client(server: S3Server, service: str = "s3", endpoint_url: str | None = None) -> Any:
    """Return a client of a server."""
    return _client(server, service, endpoint_url or server.endpoint_url)


@cache
def _client(server: S3Server, service: str, endpoint_url: str) -> Any:
    return _session().client(
        service,
        endpoint_url=endpoint_url,
        aws_access_key_id=server.access_key,
        aws_secret_access_key=server.secret_key,
        region_name="us-east-1",
    )


@cache
def _session() -> Any:
    import boto3

    # One for all: each reads the descriptions of the services anew, which takes its time.
    return boto3.session.Session()


def for_moto(policy: str) -> str:
    """Return a policy for a server that takes `?` for a part of a regular expression."""
    return policy.replace("?" * 20, "*")


def unconditional(document: Document) -> Document:
    """Return a policy without its statements that have a condition."""
    kept = [statement for statement in document["Statement"] if "Condition" not in statement]
    return {**document, "Statement": kept}


def _allow(action: str) -> Document:
    return {"Effect": "Allow", "Action": [action], "Resource": ["*"]}


def _send(address: str, body: bytes, method: str) -> None:
    request = urllib.request.Request(address, body, {"Content-Type": "text/plain"}, method=method)
    urllib.request.urlopen(request).close()


ROOT = Path(__file__).parents[2]


Terraform = Callable[..., subprocess.CompletedProcess[str]]


Apply = Callable[..., Policies]


#: With the name of a role.
Become = Callable[[str], str]


def keys_of_world(world: World) -> list[str]:
    """Return the keys of a registry, as its owner sees them."""
    pages = client(world.owner).get_paginator("list_objects_v2")
    found = pages.paginate(Bucket=world.bucket, Prefix=f"{PREFIX}/").search("Contents[].Key")
    return sorted(key.removeprefix(f"{PREFIX}/") for key in found if key)
