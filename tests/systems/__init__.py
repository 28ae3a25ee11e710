"""One life story a system: start, save, crash, resume, change phase, hand over, end."""
