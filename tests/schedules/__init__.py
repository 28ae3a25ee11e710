"""The real code under every schedule: its calls to the store interleaved one by one."""
