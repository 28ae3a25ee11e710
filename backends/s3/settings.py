"""The options of s3fs, taken over into the client of boto3.

Each option either has the same effect here, or has none on where bytes are and who may read them
(`_TUNING`: caches and file objects of s3fs), or is refused by its name. None is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from holdfast.backends.errors import InvalidLocation

#: With this variable, an account id, every request to a bucket of another account fails.
BUCKET_OWNER = "HOLDFAST_S3_BUCKET_OWNER"
#: Status of a bucket's versioning -> whether it keeps deleted objects; None: never enabled.
KEEPS: dict[str | None, bool] = {"Enabled": True, None: False}

_CREDENTIALS = {
    "key": "aws_access_key_id",
    "username": "aws_access_key_id",
    "secret": "aws_secret_access_key",
    "password": "aws_secret_access_key",
    "token": "aws_session_token",
}
_CLIENT = (*dict.fromkeys(_CREDENTIALS.values()), "verify", "use_ssl", "region_name")
_CONFIG = (
    *("connect_timeout", "read_timeout", "proxies", "proxies_config", "client_cert"),
    *("signature_version", "user_agent", "user_agent_extra", "tcp_keepalive", "region_name"),
    *("max_pool_connections", "use_dualstack_endpoint", "use_fips_endpoint"),
    *("request_checksum_calculation", "response_checksum_validation"),
)
_NUMBERS = ("connect_timeout", "read_timeout", "max_pool_connections")
_CONFIG_S3 = (
    *("addressing_style", "use_accelerate_endpoint", "use_dualstack_endpoint", "use_arn_region"),
    "us_east_1_regional_endpoint",
)
# What a put may carry: encryption and rights.
_PUT = (
    *("ServerSideEncryption", "SSEKMSKeyId", "SSEKMSEncryptionContext", "BucketKeyEnabled"),
    "ACL",
)
# What only the put of a pack carries: other objects are small, or deleted soon.
_PACK_PUT = ("StorageClass", "Tagging")
#: The storage classes whose objects are read at once.
READ_AT_ONCE = frozenset(
    {"STANDARD", "STANDARD_IA", "ONEZONE_IA", "INTELLIGENT_TIERING", "GLACIER_IR"}
)
# Caches, file objects and the event loop of s3fs: nothing of them is used here.
_TUNING = (
    *("use_listings_cache", "listings_expiry_time", "max_paths", "skip_instance_cache"),
    *("default_block_size", "default_fill_cache", "default_cache_type", "max_concurrency"),
    *("fixed_upload_size", "cache_regions", "asynchronous", "loop", "batch_size"),
)
_OFF = ("session", "version_aware", "local_expiry_check")
_OWNER_HINT = f"Set {BUCKET_OWNER}."
_HINTS = {
    "retries": "Set HOLDFAST_S3_TIMEOUT: Holdfast itself repeats requests.",
    "ExpectedBucketOwner": _OWNER_HINT,
}
_USUAL_HINT = (
    "Leave it out; or, in Python, move all bytes by s3fs: holdfast.open(..., transport='s3fs')."
)


@dataclass(frozen=True, slots=True)
class S3Settings:
    """How the client of a bucket is made, besides its endpoint and region.

    Attributes:
        profile: Name of a profile of the AWS configuration.
        anonymous: Whether requests are not signed.
        client: Options of the client: credentials and TLS.
        config: Options of its configuration.
        addressing: Options of its configuration for S3.
        requests: Parameters of every request.
        puts: Parameters of every put.
        packs: Further parameters of the put of a pack.
    """

    profile: str | None = None
    anonymous: bool = False
    # Not shown: there are secrets in it.
    client: Mapping[str, Any] = field(default_factory=dict, repr=False)
    config: Mapping[str, Any] = field(default_factory=dict, repr=False)
    addressing: Mapping[str, Any] = field(default_factory=dict)
    requests: Mapping[str, Any] = field(default_factory=dict)
    puts: Mapping[str, Any] = field(default_factory=dict, repr=False)
    packs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TakenOptions:
    """Our settings, taken over from options of s3fs.

    Attributes:
        settings: The settings.
        endpoint_url: The server, if named.
        region: The region, if named.
    """

    settings: S3Settings
    endpoint_url: str | None
    region: str | None


def take_options(options: Mapping[str, Any], where: str) -> TakenOptions:
    """Read options of s3fs.

    Args:
        options: By name, as `s3fs.S3FileSystem` takes them.
        where: The location, for messages.

    Raises:
        InvalidLocation: One has no equal here, or two contradict each other; no value is repeated.
    """
    left = _Options({n: v for n, v in options.items() if n not in _TUNING and v is not None}, where)
    left.refuse_on(_OFF)
    anonymous, pays = left.flag("anon"), left.flag("requester_pays")
    profile, endpoint_url = left.take("profile"), left.take("endpoint_url")
    client = {to: found for n, to in _CREDENTIALS.items() if (found := left.take(n)) is not None}
    if "use_ssl" in left.held:
        client["use_ssl"] = left.flag("use_ssl")
    inner = left.inner("client_kwargs")
    endpoint_url = inner.same("endpoint_url", endpoint_url)
    client |= inner.all(_CLIENT)
    configured = left.inner("config_kwargs")
    addressing = configured.inner("s3").all(_CONFIG_S3)
    configured.check_numbers(_NUMBERS)
    config = configured.all(_CONFIG)
    added = left.inner("s3_additional_kwargs")
    packs = {n: added.text(n) for n in _PACK_PUT if n in added.held}
    added.check_class(packs.get("StorageClass", "STANDARD"))
    puts = added.all(_PUT)
    left.all(())
    region = client.pop("region_name", None) or config.pop("region_name", None)
    config.pop("region_name", None)
    return TakenOptions(
        S3Settings(
            profile=profile,
            anonymous=anonymous,
            client=client,
            config=config,
            addressing=addressing,
            requests={"RequestPayer": "requester"} if pays else {},
            puts=puts,
            packs=packs,
        ),
        endpoint_url,
        region,
    )


class _Options:
    """Options that all must be used by some reader."""

    def __init__(self, held: dict[str, Any], where: str, path: str = "") -> None:
        self.held = held
        self._where = where
        self._path = path
        self._taken: list[str] = []

    def take(self, name: str) -> Any:
        self._taken.append(name)
        return self.held.pop(name, None)

    def same(self, name: str, other: Any) -> Any:
        """Take an option that may have been given before, then as the same."""
        found = self.take(name)
        if None not in (found, other) and found != other:
            raise self._error(f"two values of {name}", self._path + name, "Give one of them.")
        return other if found is None else found

    def flag(self, name: str) -> bool:
        found = self.take(name)
        # Environment and command line give text.
        words: dict[object, bool] = {
            None: False,
            "true": True,
            "false": False,
            "1": True,
            "0": False,
        }
        if isinstance(found, bool):
            return found
        try:
            return words[found.lower() if isinstance(found, str) else found]
        except (KeyError, TypeError) as error:
            raise self._error("an option is neither true nor false", name, None) from error

    def check_numbers(self, names: Iterable[str]) -> None:
        for name in names:
            found = self.held.get(name, 1)
            is_number = isinstance(found, (int, float)) and not isinstance(found, bool)
            if not is_number or not found > 0:
                raise self._error("an option is no positive number", self._path + name, None)

    def text(self, name: str) -> str:
        found = self.take(name)
        if not isinstance(found, str):
            raise self._error("an option is no text", self._path + name, None)
        return found

    def check_class(self, storage_class: str) -> None:
        if storage_class not in READ_AT_ONCE:
            name = f"{self._path}StorageClass"
            hint = f"Give one of {', '.join(sorted(READ_AT_ONCE))}. `holdfast tier` archives packs."
            raise self._error("not a storage class whose objects are read at once", name, hint)

    def inner(self, name: str) -> _Options:
        found = self.take(name)
        if found is None:
            found = {}
        if not isinstance(found, Mapping):
            raise self._error("an option is no mapping", self._path + name, None)
        return _Options(dict(found), self._where, f"{self._path}{name}.")

    def all(self, known: Iterable[str]) -> dict[str, Any]:
        """Take the known ones; there must be no others."""
        unknown = sorted(set(self.held) - set(known))
        if unknown:
            close = get_close_matches(unknown[0], [*known, *self._taken], cutoff=0.75)
            usual = f"Did you mean {self._path}{close[0]}?" if close else _USUAL_HINT
            hint = _HINTS.get(unknown[0], usual)
            names = ", ".join(self._path + name for name in unknown)
            raise self._error("options that cannot be taken over from s3fs", names, hint)
        return self.held

    def refuse_on(self, names: Iterable[str]) -> None:
        for name in names:
            if self.held.get(name) not in (None, False):
                raise self._error("options that cannot be taken over from s3fs", name, _USUAL_HINT)
            self.take(name)

    def _error(self, what: str, names: str, hint: str | None) -> InvalidLocation:
        return InvalidLocation(what, where=self._where, found=names, hint=hint)
