"""Mutants of lesson 16's references that are equivalent to the reference, and why (see `minillm.teaching.mutants`)."""

EQUIVALENT = {
    "l16.row_parallel": {
        "width = parts[0].shape[1] [parts[0] -> parts[-1]]": "all ranks have parts of the same width",
    },
}
