"""Pictures of the KV cache: block tables and physical pages of the pool, and a contiguous cache as it grows."""
