"""Looking into tensors piece by piece, in bounded memory: sums, norms, distances."""
