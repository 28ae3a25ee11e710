"""Holdfast inside other programs. Each module wraps one of them, and only it imports that package.

- `lightning`, `lightning_io`, `transformers`, `wandb`, `ipython`.
- `saving`: the parts that trainers share.
- `dcp`: runs as storage of torch.distributed.checkpoint.
- `filesystem`: stored states as files of a read-only fsspec file system, `holdfast://`.

Users import them as `holdfast.lightning`, `holdfast.dcp`, `holdfast.filesystem` and so on.
Specified in docs/spec.md, sections 38 and 43.
"""
