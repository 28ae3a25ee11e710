"""What lies on a store, byte for byte: keys, manifests, packs, placements."""
