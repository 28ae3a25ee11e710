"""The history of a run: its log, the actions in it, their replay, and what retention decides."""
