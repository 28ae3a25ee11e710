"""In the training loop: when to save, and what signals, notices and other ranks ask for.

- `checkpointer`: `Checkpointer`, what `run.checkpointer(...)` gives; `options`: its arguments.
- `cadence`: steps, seconds and the best metric; `overhead`: for how long training waited for saves.
- `signals`: the handlers; `deadline`: the thread that ends a process that takes too long to leave;
  `notice`: a file or a callable that announces the end.
- `ranks`: several processes that leave together; `torch_ranks`: those of torch.distributed.
- `last_heard`: whether a run is still heard of.

It stores nothing of its own: it calls `holdfast.registry.training`. `runs` depends on this room.
Specified in docs/spec.md, section 36; docs/training.md is for users.
"""
