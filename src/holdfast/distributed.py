"""Saves and loads that every rank of a job makes together: `holdfast.distributed.TorchGroup()`.

```python
torch.distributed.init_process_group(...)
run = reg.run("my-run", create=True, group=holdfast.distributed.TorchGroup())
run.save({"model": model, "optimizer": optimizer}, step=step)  # on every rank
```
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.registry.saving.collective.group import Group, LinksBroken, ThreadGroup
from holdfast.registry.saving.collective.loading import load_into
from holdfast.registry.saving.collective.shards import PerRank

if TYPE_CHECKING:
    from holdfast.registry.saving.collective.torch_group import TorchGroup
else:
    from holdfast.registry.values.first_use import at_first_use

    __getattr__ = at_first_use(__name__)

__all__ = ["Group", "LinksBroken", "PerRank", "ThreadGroup", "TorchGroup", "load_into"]
