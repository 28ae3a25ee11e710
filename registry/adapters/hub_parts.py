"""The parts of a model of transformers or PEFT, as the components of a checkpoint."""

from __future__ import annotations

import json
from typing import Any

from holdfast.registry.errors import InvalidInput
from holdfast.registry.layouts import CONFIGS, METADATA


def model_parts(model: Any) -> dict[str, Any]:
    """Return the components of a model: weights, configurations, and metadata of their file."""
    parts = {METADATA: {"format": "pt"}}
    if hasattr(model, "peft_config"):
        from peft import get_peft_model_state_dict  # only a PEFT model needs it

        name, *others = model.active_adapters
        if others:
            raise InvalidInput("several adapters are active", found=", ".join([name, *others]))
        config = model.peft_config[name].to_dict()
        files = {"adapter_config.json": {**config, "inference_mode": True}}
        weights = {"adapter": dict(get_peft_model_state_dict(model, adapter_name=name))}
    else:
        kinds = {"config.json": "config", "generation_config.json": "generation_config"}
        found = {file: getattr(model, kind, None) for file, kind in kinds.items()}
        files = {file: one.to_dict() for file, one in found.items() if one is not None}
        weights = {"model": model.state_dict()}
    plain = json.loads(json.dumps(files, default=_plain, sort_keys=True))
    return {**weights, **parts, CONFIGS: plain}


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set) else str(value)
