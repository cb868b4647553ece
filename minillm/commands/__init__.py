"""The commands of `minillm`, one a file; `parser` lists them."""
