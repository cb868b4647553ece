"""`minillm export`: write a checkpoint in the format of another engine."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from minillm.commands.command import Command
from minillm.commands.output_checks import check_new_file

if TYPE_CHECKING:
    from minillm.export.gguf import GgufExport

EXAMPLES = """\
  minillm export minicoder --gguf minicoder.gguf
  minillm export minicoder --gguf minicoder-q8.gguf --type q8_0
"""
TYPES = {
    "f32": "exact for every checkpoint",
    "f16": "exact for an fp16 checkpoint",
    "bf16": "exact for a bf16 checkpoint",
    "q8_0": "8 bits, a scale for every 32 weights",
}
"""Repeated here so that `--help` imports nothing slow."""


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    listing = "; ".join(f"{name}: {what}" for name, what in TYPES.items())
    parser.add_argument("model", help="bundled name, folder or hub id of a full-precision checkpoint")
    parser.add_argument("--gguf", required=True, type=Path, metavar="FILE", help="a new file, for llama.cpp")
    parser.add_argument("--type", default="f32", metavar="TYPE", help=f"{listing} (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Write the file and print a summary."""
    check_new_file("--gguf", args.gguf)
    from minillm.export.gguf import export_gguf

    export = export_gguf(args.model, args.gguf, args.type, progress=True)
    print(f"{export.file}: {export.num_bytes:,} bytes, architecture {export.architecture}, {args.type}")
    print(_about_tokenizer(export))
    return 0


def _about_tokenizer(export: GgufExport) -> str:
    tokenizer = export.tokenizer
    if tokenizer is None:
        return "No tokenizer: llama.cpp needs a byte-level BPE. The file works with token ids, not with text."
    same = f"the same tokens as the original for {tokenizer.agreement:.0%} of the held-out texts"
    return f"Tokenizer: {len(tokenizer.tokens):,} tokens, split as {tokenizer.pre!r}: {same}."


COMMAND = Command(
    "export",
    "Write a checkpoint for another engine: a GGUF file for llama.cpp.",
    EXAMPLES,
    options,
    run,
)
