"""Saves and loads that every rank of a job makes together; one commit for all.

- `group`: `Group`, the seam between the ranks: messages with deadlines, and bulk bytes.
  `torch_group` is that of torch.distributed; `wire` spells the messages and errors.
- `shards`, `torch_shards`: a state as one rank has it, with the box that it has of each tensor;
  `per_rank`: values that each rank has for itself.
- `structure`: tensors and chunks as boxes; `boxes`: those of one rank, written shortly;
  `patterns`: tensors that are cut alike; `plan`: who stores which chunk, and which bytes travel
  for that; `planning` makes plans, `rounds` carries them out for a save, `spreading` for a load.
- `part`: what one rank stores; `agreement` compares what all have.
- `chunk_table`: chunks and where they are stored, in columns.
- `leading`, `following`: the two sides of a save; `side`: what both have; `storing`: its end, on
  rank 0; `talk`: its messages; `outcome`: how it ended. `trainer`: the trainer of a run with a
  group.
- `filling`: fill boxes of stored tensors; `loading`: those of sharded models.

Nothing on the store shows how many ranks wrote a state. Specified in docs/spec.md, section 43.
"""
