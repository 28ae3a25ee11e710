"""S3 servers for tests."""
