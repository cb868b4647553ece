"""The two engines of `minillm demo`: the bundled model with and without its draft model, on the same prompts."""

from __future__ import annotations

from contextlib import ExitStack

from rich.console import Console
from rich.text import Text

from minillm.llm import LLM
from minillm.request import Request
from minillm.sampling import SamplingParams
from minillm.trace.run_metrics import RunMetrics
from minillm.viz.terminal.two_engines import final_table, watch

PROMPTS = [
    "def read_lines(path):\n    with open(path) as f:\n",
    "import os\nimport sys\n\n\ndef main():\n    parser = argparse.ArgumentParser(",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "    def __repr__(self):\n        return ",
]
NUM_DRAFTS = 3
NEW_TOKENS = 64
MAX_RUNNING = 2
"""Two requests at a time, so that the others are seen to wait in the queue until one finishes."""


def run_demo(console: Console | None = None, pause: float = 0.0) -> None:
    """Run both engines one step each in turn, show their cache pages and verdicts, and end with a table of metrics.

    `pause` is the seconds to wait after each step.
    """
    console = console or Console()
    with console.status("loading minicoder and minicoder-draft"):
        engines = {
            "plain": LLM("minicoder", num_kv_blocks=24, max_num_seqs=MAX_RUNNING),
            f"with a draft, γ = {NUM_DRAFTS}": LLM(
                "minicoder",
                num_kv_blocks=24,
                max_num_seqs=MAX_RUNNING,
                speculative_config={
                    "method": "draft_model",
                    "model": "minicoder-draft",
                    "num_speculative_tokens": NUM_DRAFTS,
                    "adaptive": False,  # to show drafts, whether they pay on this machine or not
                },
            ),
        }
        for llm in engines.values():
            llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    with ExitStack() as stack:
        traces = {name: stack.enter_context(llm.trace()) for name, llm in engines.items()}
        plain, drafted = watch(traces, lambda: _in_turn(list(engines.values())), console=console, pause=pause)
    console.print(Text(PROMPTS[2], "dim") + Text(plain[2].text, "bold"), highlight=False)
    console.print()
    console.print(final_table({name: RunMetrics.of(trace) for name, trace in traces.items()}))
    same = [request.token_ids for request in plain] == [request.token_ids for request in drafted]
    console.print(
        "Both engines gave the same tokens."
        if same
        else "The engines differ in a token: two candidates were within rounding of each other."
    )


def _in_turn(llms: list[LLM]) -> list[list[Request]]:
    """Run one step of each engine in turn until all are done. Returns each engine's requests."""
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    requests = [llm.submit(PROMPTS, params) for llm in llms]
    while any(llm.engine.has_requests for llm in llms):
        for llm in llms:
            if llm.engine.has_requests:
                llm.engine.step()
    return requests
