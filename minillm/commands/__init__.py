"""The subcommands of `minillm`, one per file; `parser` lists them."""
