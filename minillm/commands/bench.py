"""`minillm bench`: run one benchmark."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minillm.bench.benchmarks import BENCHMARKS, find, find_table
from minillm.commands.command import Command
from minillm.commands.output_checks import check_new_file
from minillm.errors import ConfigError

EXAMPLES = """\
  minillm bench decode
  minillm bench decode --systems "transformers fp32,minillm fp32,minillm int8" --rounds 7 --json decode.json
  minillm bench decode --shape 0.4b
  minillm bench kernels --ops paged_attention,int8_linear
  minillm bench quality
  minillm bench zoo --quick
  minillm bench zoo --systems snapkv,window --distances 100,800 --json zoo.json
  minillm bench speculation --slices edits,functions --weights int8 --batches 1
  minillm bench gpu --json gpu.json
"""
NOT_FOR_THE_BENCHMARK = ("name", "json", "run")
"""Parsed arguments that are not options of the benchmark."""


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options. Those of the second group are passed to the benchmark."""
    listing = "; ".join(f"{name}: {what}" for name, what in BENCHMARKS.items())
    parser.add_argument("name", choices=BENCHMARKS, help=listing)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result to FILE")
    own = parser.add_argument_group("what to measure (each benchmark has some of these, and its own defaults)")
    own.add_argument("--model", help="bundled name, folder or hub id")
    own.add_argument(
        "--draft", metavar="MODEL", help="the draft model (default: the bundled one, if the model is bundled)"
    )
    own.add_argument("--shape", help="a random checkpoint of this shape in place of the model: 0.4b")
    own.add_argument("--systems", type=names, metavar="A,B", help="run only these systems")
    own.add_argument("--ops", type=names, metavar="A,B", help="measure only these ops")
    own.add_argument("--stages", type=names, metavar="A,B", help="run only these stages")
    own.add_argument(
        "--rehearse", action="store_const", const=True, help="run the stages of `gpu` on a CPU, with tiny sizes"
    )
    own.add_argument("--quick", action="store_const", const=True, help="fewer texts and tasks")
    own.add_argument(
        "--distances", type=numbers, metavar="N,N", help="how many tokens back a definition to recall stands: 100,800"
    )
    own.add_argument("--rounds", type=positive, metavar="N", help="measure every system N times in turn")
    own.add_argument(
        "--seconds",
        type=positive,
        metavar="S",
        help="more rounds if plain decoding runs for less than S seconds",
    )
    own.add_argument("--prompts", type=positive, metavar="N", help="how many held-out prompts")
    own.add_argument("--new-tokens", type=positive, metavar="N", help="tokens to generate per prompt")
    own.add_argument("--methods", type=names, metavar="A,B", help="measure only these drafting methods")
    own.add_argument(
        "--drafters", type=Path, metavar="FOLDER", help="where `minillm train` has exported drafters (default: bundled)"
    )
    own.add_argument("--slices", type=names, metavar="A,B", help="measure only these kinds of text")
    own.add_argument("--weights", type=names, metavar="A,B", help="measure only these: fp32, int8, w8a8")
    own.add_argument("--batches", type=numbers, metavar="N,N", help="how many requests run together: 1,4,16")
    own.add_argument("--drafts", type=positive, metavar="K", help="draft tokens per round")
    own.add_argument("--block-size", type=positive, metavar="N", help="tokens per cache block")


def run(args: argparse.Namespace) -> int:
    """Run one benchmark, write its JSON and print its table."""
    if args.json:
        check_new_file("--json", args.json)
    from minillm.bench import provenance
    from minillm.bench.harness import save
    from minillm.bench.tables import speed_table
    from minillm.commands.tables import print_table

    provenance.of_this_process()
    measure = find(args.name)
    given = _own_options(args, measure)
    if "save_to" in inspect.signature(measure).parameters:  # it writes partial results, in case it is killed
        given["save_to"] = args.json
    result = measure(**given)
    if args.json:  # before it is printed, which may fail
        save(result, args.json)
    print_table((find_table(args.name) or speed_table)(result))
    return 0


def _own_options(args: argparse.Namespace, measure: Callable[..., Any]) -> dict[str, Any]:
    """The options that were given. Raises `ConfigError` for one that this benchmark lacks."""
    options_here = {key: value for key, value in vars(args).items() if key not in NOT_FOR_THE_BENCHMARK}
    given = {key: value for key, value in options_here.items() if value is not None}
    known = inspect.signature(measure).parameters
    for name in given:
        if name not in known:
            listing = ", ".join(_flag(key) for key in options_here if key in known) or "none"
            raise ConfigError(f"bench {args.name} has no {_flag(name)}; its options: {listing}")
    return given


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def names(text: str) -> list[str]:
    """The type of an option that takes names: `A,B`."""
    found = [name.strip() for name in text.split(",") if name.strip()]
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is an empty list; leave the option out for all of them")
    return found


def numbers(text: str) -> list[int]:
    """The type of an option that takes numbers: `1,4,16`."""
    return [positive(name) for name in names(text)]


def positive(text: str) -> int:
    """The type of an option that takes a number from 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value


COMMAND = Command(
    "bench",
    "Run a benchmark: systems measured in turn, reported as median ratios with their spread.",
    EXAMPLES,
    options,
    run,
)
