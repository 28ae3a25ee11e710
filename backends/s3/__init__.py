"""The store in a bucket of S3, over the core of boto3.

- `backend`: `S3Backend`; `client`: the SDK's client, with connections that can be cut.
- `small`: `SmallObjectsBackend`, for which obstore moves the small objects.
- `body`: moves bytes between buffers and sockets; `proof`: checks that an answer is the store's.
- `errors`: what S3's errors mean; `settings`: which options of s3fs are taken over.

docs/spec.md, section 1.
"""
