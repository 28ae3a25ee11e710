"""Values that everything else is built from: digests, canonical JSON, records, element types."""
