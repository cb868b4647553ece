"""`minillm export`: write a checkpoint in the format of another engine."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
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
    print("\n".join(_about_tokenizer(export)))
    return 0


def _about_tokenizer(export: GgufExport) -> Iterator[str]:
    tokenizer = export.tokenizer
    if tokenizer is None:
        yield "No tokenizer: llama.cpp needs a byte-level BPE. The file works with token ids, not with text."
        return
    same = f"the same tokens as the original for {tokenizer.agreement:.0%} of the held-out texts"
    yield f"Tokenizer: {len(tokenizer.tokens):,} tokens, split as {tokenizer.pre!r}: {same}."
    named, *others = export.end_tokens
    if others:
        left_out = ", ".join(f"{token} ({tokenizer.tokens[token]})" for token in others)
        yield (
            f"End of text: token {named} ({tokenizer.tokens[named]}). The file cannot name {left_out}; llama.cpp ends "
            "there only if it knows the text."
        )
    if not tokenizer.chat_templates:
        yield "No chat template: the checkpoint has none, and llama.cpp's server would use ChatML."


COMMAND = Command(
    "export",
    "Write a checkpoint for another engine: a GGUF file for llama.cpp.",
    EXAMPLES,
    options,
    run,
)
