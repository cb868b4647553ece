"""Pictures of tensors: attention and its masks, caches, codebooks, errors, and who computes which part."""
