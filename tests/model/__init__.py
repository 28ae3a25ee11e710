"""The collection protocol as executable specification, explored state by state."""
