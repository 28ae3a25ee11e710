"""`Storing`: how the bytes of a save are stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.backends.escape import quoted
from holdfast.registry.errors import InvalidInput
from holdfast.registry.objects.codecs import COMPRESSIONS, Compression, check_compression
from holdfast.registry.spec.precision import Precision, PrecisionPolicy
from holdfast.registry.store import RegistryConfig
from holdfast.registry.writing.deltas import check_keyframe_every


@dataclass(frozen=True, slots=True, kw_only=True)
class Storing:
    """How a save stores its bytes: `run.save(state, step=1, storing=Storing(compression="zstd"))`.

    Only `precision` changes what is stored, and so the id.

    Attributes:
        compression: `none`, `zstd` or `lz4`, for new chunks. Default: the registry's own.
        keyframe_every: A chunk that changes from save to save is stored whole at least once in this
            many versions, 1 to 32. In between it is stored as a difference if that is clearly
            shorter; 1 turns differences off. Default: the registry's own.
        precision: Which float32 and float64 tensors are stored in fewer bits: one policy for all,
            or policies by path pattern, of which the first match counts:
            `{"model/*": "bf16", "*": "auto"}`. A policy is `bf16`, `fp16`, `auto` (`bf16` for
            tensors of 1 MiB and more), `auto-fp16` (`fp16` above 1 MiB) or `keep`; a name of the
            preset's `precision` stands for its rules. The loss is recorded and shown. Companions
            are not changed.
        allow_lossy_optimizer: Apply `precision` to optimizer state too. Without it optimizer state
            keeps its precision, and a pattern that matches nothing else is an error.

    Raises:
        InvalidInput: A value is wrong, or differences are wanted without compression.
    """

    compression: Compression | None = None
    keyframe_every: int | None = None
    precision: PrecisionPolicy | None = None
    allow_lossy_optimizer: bool = False

    def __post_init__(self) -> None:
        """Check the values, and keep a copy of the policies."""
        check_compression(self.compression)
        check_keyframe_every(self.keyframe_every, compresses=self.compression != "none")
        if isinstance(self.precision, Mapping):
            object.__setattr__(self, "precision", dict(self.precision) or None)
        Precision.check(self.precision)


def check_storing(given: object) -> Storing:
    """Return how a save stores its bytes: as given, or as the registry says."""
    if given is None:
        return Storing()
    if not isinstance(given, Storing):
        raise InvalidInput(
            "not a way to store a checkpoint",
            where="storing",
            expected="holdfast.Storing(...)",
            found=quoted(given),
        )
    return given


def codec_and_distance(storing: Storing, config: RegistryConfig) -> tuple[str, int]:
    """Return the codec of new chunks, and in how many versions one is stored whole."""
    every = storing.keyframe_every or config.keyframe_every or 1
    default: Compression = "none" if every == 1 else "zstd"
    return COMPRESSIONS[storing.compression or config.compression or default], every
