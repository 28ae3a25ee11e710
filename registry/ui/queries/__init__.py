"""What the views ask: each module reads a registry and returns frozen dataclasses, without HTML."""
