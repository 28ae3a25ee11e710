"""The way of a state off the store: fetched, decoded, verified, into whose memory."""
