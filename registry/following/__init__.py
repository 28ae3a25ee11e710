"""Following a run: its checkpoints shared out, or its newest weights kept in a model."""
