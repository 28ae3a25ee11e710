"""A read-only endpoint for the clients of Hugging Face: `holdfast hub`. It keeps no state.

- `views`: the files of a stored state as such a client sees them, and the revision that names them.
- `catalog`: from a repository and a revision to a view.
- `access`: tokens, and the runs that each may read.
- `exporting`: a release as plain files of safetensors, in a folder or bucket.
- `endpoint`: the requests of the clients, and the answers.
- `engines`: inference engines at the newest weights: files on their host, and requests to them.

The server itself is that of the pages, `holdfast.registry.ui`. Specified in docs/spec.md,
section 46.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.registry.hub.access import Access, read_tokens
    from holdfast.registry.hub.catalog import Catalog, refusal
    from holdfast.registry.hub.endpoint import Endpoint
    from holdfast.registry.hub.exporting import export_release
    from holdfast.registry.hub.views import ViewOptions
else:
    from holdfast.registry.values.first_use import at_first_use

    __getattr__ = at_first_use(__name__)
