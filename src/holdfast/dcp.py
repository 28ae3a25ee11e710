"""torch.distributed.checkpoint into a run and out of it: `HoldfastWriter(run, step=step)`.

```python
writer = HoldfastWriter(run, step=step)
dcp.save(state, storage_writer=writer, planner=HoldfastSavePlanner(), use_collectives=False)
dcp.load(state, storage_reader=HoldfastReader(run.latest()))
```

docs/scale.md shows the rest. Needs `holdfast-registry[torch]`.
"""

from __future__ import annotations

from holdfast.registry.adapters.dcp.reader import HoldfastReader
from holdfast.registry.adapters.dcp.writer import HoldfastSavePlanner, HoldfastWriter, typed_errors

__all__ = ["HoldfastReader", "HoldfastSavePlanner", "HoldfastWriter", "typed_errors"]
