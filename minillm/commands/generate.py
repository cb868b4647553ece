"""`minillm generate`: complete a prompt."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from minillm.commands.command import Command
from minillm.errors import ConfigError, PromptError

if TYPE_CHECKING:
    from minillm.llm import LLM
    from minillm.sampling import SamplingParams
    from minillm.trace.request_metrics import RequestMetrics

EXAMPLES = """\
  minillm generate "def fib(n):" --max-tokens 64
  minillm generate "def fib(n):" --temperature 0.8 --seed 7 --stream
  minillm generate "def fib(n):" --draft minicoder-draft --num-speculative-tokens 4
  minillm generate "def fib(n):" --speculative-method suffix
  minillm generate - < start_of_a_file.py
"""
MAX_INPUT = 2**24
"""Characters. No context is longer, and an input such as /dev/zero never ends."""


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("prompt", help="the text to complete; - reads standard input")
    parser.add_argument("--model", default="minicoder", help="bundled name, folder or hub id (default: %(default)s)")
    parser.add_argument("--dtype", default="auto", help="auto, float32, float16 or bfloat16")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--stream", action="store_true", help="print each piece as soon as it is generated")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-tokens", type=int, default=64, metavar="N", help="at most N tokens (default: 64)")
    sampling.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0, the default: greedy")
    sampling.add_argument("--top-p", type=float, default=1.0, metavar="P")
    sampling.add_argument("--top-k", type=int, default=0, metavar="K", help="0: all tokens")
    sampling.add_argument("--seed", type=int, metavar="SEED", help="the same seed gives the same text")
    sampling.add_argument("--stop", action="append", metavar="TEXT", help="stop before TEXT; may be repeated")
    speculation = parser.add_argument_group("speculative decoding")
    speculation.add_argument("--draft", metavar="MODEL", help="a small draft model")
    speculation.add_argument(
        "--speculative-method",
        metavar="METHOD",
        help="ngram, suffix: from earlier text; self_sparse, self_quant: the target itself; draft_model, draft_tree, "
        "staged: with --draft MODEL; heads, prompt_tokens: bundled for minicoder; spire, long: with --draft FOLDER, "
        "whose weights `minillm train` makes",
    )
    speculation.add_argument(
        "--num-speculative-tokens", type=int, metavar="K", help="most draft tokens per round (default: the method's)"
    )


def run(args: argparse.Namespace) -> int:
    """Load the engine, complete the prompt and print its metrics."""
    prompt = _standard_input() if args.prompt == "-" else args.prompt

    from minillm.llm import LLM
    from minillm.sampling import SamplingParams

    params = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        seed=args.seed,
        stop=args.stop,
    )
    llm = LLM(args.model, dtype=args.dtype, device=args.device, speculative_config=_speculation(args))
    (_stream if args.stream else _print)(llm, prompt, params)
    return 0


def _standard_input() -> str:
    if sys.stdin is None:
        raise ConfigError("standard input is closed; give the prompt itself instead of -")
    try:
        text = sys.stdin.read(MAX_INPUT + 1)
    except UnicodeDecodeError as problem:
        raise PromptError(f"standard input is not {problem.encoding}; convert it") from None
    if len(text) > MAX_INPUT:
        raise PromptError(f"standard input has more than {MAX_INPUT:,} characters; give a shorter prompt")
    return text


def _speculation(args: argparse.Namespace) -> dict[str, Any] | None:
    """The `speculative_config` of the options; None without speculative decoding."""
    method = args.speculative_method
    if method is None and args.draft is not None:
        method = "draft_model"
    given = {
        "method": method,
        "model": args.draft,
        "num_speculative_tokens": args.num_speculative_tokens,
    }
    if method is None and args.num_speculative_tokens is not None:
        raise ConfigError(
            f"--num-speculative-tokens {args.num_speculative_tokens} needs --draft MODEL or --speculative-method METHOD"
        )
    return {name: value for name, value in given.items() if value is not None} or None


def _stream(llm: LLM, prompt: str, params: SamplingParams) -> None:
    first = prompt  # printed only after the prompt has been checked
    for piece in llm.stream(prompt, params):
        print(first + piece, end="", flush=True)
        first = ""
    print(first)


def _print(llm: LLM, prompt: str, params: SamplingParams) -> None:
    [output] = llm.generate([prompt], params, use_tqdm=False)
    print(prompt + output.outputs[0].text)
    print(cost(output.metrics), file=sys.stderr)


def cost(metrics: RequestMetrics) -> str:
    """The metrics of a request in one line: tokens, latency and acceptance."""
    parts = [f"{metrics.num_output_tokens} tokens"]
    if metrics.ttft is not None:
        parts.append(f"first after {metrics.ttft * 1e3:.0f} ms")
    if metrics.tpot:
        parts.append(f"then {1 / metrics.tpot:.0f} per second")
    if metrics.acceptance_rate is not None:
        parts.append(f"{metrics.acceptance_rate:.0%} of {metrics.num_drafts} drafts accepted")
        parts.append(f"{metrics.tokens_per_forward:.2f} tokens per target forward")
    return ", ".join(parts)


COMMAND = Command(
    "generate",
    "Complete a prompt: the text goes to standard output, its metrics (without --stream) to standard error.",
    EXAMPLES,
    options,
    run,
)
