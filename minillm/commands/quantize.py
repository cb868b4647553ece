"""`minillm quantize`: write a quantised copy of a checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from minillm.commands.command import Command
from minillm.commands.output_checks import check_writable

if TYPE_CHECKING:
    from rich.table import Table

    from minillm.export.write_quantized import Conversion

EXAMPLES = """\
  minillm quantize minicoder --scheme int8 --out minicoder-int8
  minillm quantize minicoder --scheme awq --group-size 64 --out minicoder-awq
  minillm quantize minicoder --scheme squeezellm --bits 3 --out minicoder-3bit
"""
SCHEMES = {
    "int8": "8-bit weights",
    "w8a8": "8-bit weights and activations",
    "int4": "4-bit weights in groups, rounded to nearest",
    "awq": "4 or 3 bits, channels scaled by their activations",
    "squeezellm": "2 to 4 bits with a codebook per row, and sparse values kept exact",
}
"""Repeated here so that `--help` imports nothing slow."""


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    listing = "; ".join(f"{name}: {what}" for name, what in SCHEMES.items())
    parser.add_argument("model", help="bundled name, folder or hub id of a full-precision checkpoint")
    parser.add_argument("--scheme", required=True, help=listing)
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="a new folder for the result")
    parser.add_argument("--bits", type=int, metavar="B", help="bits per weight (default: the scheme's)")
    parser.add_argument(
        "--group-size", type=int, metavar="G", help="weights that share a scale (int4, awq; default: 128)"
    )


def run(args: argparse.Namespace) -> int:
    """Quantise the checkpoint, write it and print the sizes."""
    from minillm.commands.tables import print_table
    from minillm.export.write_quantized import quantize_checkpoint
    from minillm.models.quantized_checkpoint import check_new_folder
    from minillm.quantization.schemes import make_scheme

    check_new_folder(args.out)
    check_writable("--out", args.out if args.out.exists() else args.out.parent)
    given = {"bits": args.bits, "group_size": args.group_size}
    scheme = make_scheme(args.scheme, **{name: value for name, value in given.items() if value is not None})
    conversion = quantize_checkpoint(args.model, scheme, args.out, progress=True)
    print_table(sizes_table(args.model, args.scheme, conversion))
    print(f"Load it with LLM({str(args.out)!r}).")
    return 0


def sizes_table(model: str, scheme: str, conversion: Conversion) -> Table:
    """Bytes before and after, by kind of tensor."""
    from rich.table import Table

    after = sum(conversion.linears_after.values())
    table = Table(title=f"{model}, {scheme}: {conversion.bits_per_weight:.3f} bits per weight")
    for heading in ("bytes of", "before", "after", "ratio"):
        table.add_column(heading, justify="left" if heading == "bytes of" else "right")
    for part, size in conversion.linears_after.items():
        table.add_row(f"  {part}", f"{conversion.linears_before:,}" if part == "weights" else "", f"{size:,}", "")
    table.add_row("linears", *_change(conversion.linears_before, after))
    table.add_row("embedding, norms, biases", *_change(conversion.others, conversion.others))
    table.add_section()
    table.add_row("all", *_change(conversion.linears_before + conversion.others, after + conversion.others))
    return table


def _change(before: int, after: int) -> tuple[str, str, str]:
    return f"{before:,}", f"{after:,}", f"{before / after:.2f}×"


COMMAND = Command(
    "quantize",
    "Write a quantised checkpoint: fewer bits for the weights of every layer; awq and squeezellm are calibrated on "
    "held-out code.",
    EXAMPLES,
    options,
    run,
)
