"""The way of a state onto the store: what is new of it, encoded, packed and placed."""
