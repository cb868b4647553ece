"""Pictures of tensors: masks, errors, and the elements that each program of a kernel writes."""
