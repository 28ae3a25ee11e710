"""Random number generators as a part of a state: `holdfast.rng.capture()`, `.restore(state)`.

```python
run.save({"model": model, "rng": holdfast.rng.capture()}, step=step)
...
holdfast.rng.restore(restored.state["rng"])
```
"""

from __future__ import annotations

from holdfast.registry.exact_resume.rng import capture, restore

__all__ = ["capture", "restore"]
