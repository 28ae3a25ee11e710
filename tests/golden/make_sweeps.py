"""How the golden samples of sweeps with tables were made: an upgrade, and two sweeps after it."""

from __future__ import annotations

from holdfast.backends import Backend
from holdfast.registry.face.factory import open_on
from holdfast.registry.history.epochs import Epochs, encode_upgrade
from holdfast.registry.objects.keys import ObjectKey, epoch_key
from holdfast.registry.values.digest import Digest
from tests.golden.make import condemned

#: The keys that each sweep condemned, by epoch. Its shard has more than one block.
SWEEPS = {
    2: [key for key in condemned() if key.generation < 2],
    3: [ObjectKey("packs", Digest.of(b"golden %d" % i), i % 3) for i in range(1_000)],
}


def build(backend: Backend) -> None:
    """Put the epochs into a new registry."""
    backend.put(epoch_key(1), encode_upgrade(1, 3))
    with open_on(backend) as reg:
        epochs = Epochs(reg.handle.store)
        for epoch, keys in SWEEPS.items():
            assert epochs.observe() == epoch - 1
            keys = sorted(keys, key=lambda key: key.record)
            assert epochs.put_sweep(epoch, keys, joins=True)
