"""Keep inference engines at the newest checkpoint of a run: SGLang, vLLM, or a call of yours.

docs/engines.md in the source tree describes it; `holdfast follow` is the same as a command.
"""

from __future__ import annotations

from holdfast.registry.hub.engines import EngineFollower, FollowedVersion, WeightFolders

__all__ = ["EngineFollower", "FollowedVersion", "WeightFolders"]
