"""The commands of `minillm`, one a file; `minillm.cli` lists them."""
