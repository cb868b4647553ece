"""Pictures of speculative decoding: a round is a row, a token is a box."""
