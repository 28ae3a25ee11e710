"""Random number generators as a part of a state, alone or with the position in the data.

```python
run.save({"model": model, "rng": holdfast.rng.capture()}, step=step)
...
holdfast.rng.restore(restored.state["rng"])
```

A loop over a loader iterates over `holdfast.rng.Batches(loader)` instead, which has both.
"""

from __future__ import annotations

from holdfast.registry.face.batches import Batches
from holdfast.registry.face.rng import capture, restore

__all__ = ["Batches", "capture", "restore"]
