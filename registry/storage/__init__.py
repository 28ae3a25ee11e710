"""Objects on a store: keys, manifests, packs, placements; read, decoded, verified and cached."""
