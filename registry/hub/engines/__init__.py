"""Keep the weights of inference engines at the newest checkpoint of a run: `holdfast follow`.

- `attesting`: whose weights an engine has in memory, by the digests that it gives.
- `following`: `EngineFollower` chooses the version, has the folder made and every engine told.
- `folder`: the versions on the host of the engine, each a folder of plain files that never changes.
- `lora`: adapters by name, for vLLM's plug-in.
- `publishing`: versions as folders on a shared file system, for engines that pull them.
- `telling`: what SGLang and vLLM are sent, and which URLs are.

Only `--report` writes to the store. Described in docs/engines.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.registry.hub.engines.attesting import attest
    from holdfast.registry.hub.engines.folder import FollowedVersion
    from holdfast.registry.hub.engines.following import EngineFollower
    from holdfast.registry.hub.engines.publishing import WeightFolders
    from holdfast.registry.hub.engines.telling import Requests, key_of
else:
    from holdfast.registry.values.first_use import at_first_use

    __getattr__ = at_first_use(__name__)
