"""Files made to harm: each is refused by name, runs nothing and leaves nothing behind."""
