"""The subcommands of `minillm`, one per file, which `parser` lists, and what they share."""
