"""The terraform module: its policies, applied for real and tried role by operation."""
