"""Draws the pictures of the README from a real run: `python docs/pictures.py`."""

from __future__ import annotations

from pathlib import Path

from minillm import LLM, SamplingParams
from minillm.commands.side_by_side import PROMPTS
from minillm.trace import RequestFinished, StepFinished, StepRan, TokensCommitted, Trace
from minillm.viz import AcceptanceStrip, CachePagesView

SPECULATIVE = {"method": "draft_model", "model": "minicoder-draft", "num_speculative_tokens": 4, "adaptive": False}


def main() -> None:
    """Record three requests and keep a moment in which every one of them is at work and some drafts were wrong."""
    llm = LLM("minicoder", num_kv_blocks=24, speculative_config=SPECULATIVE)
    with llm.trace() as trace:
        llm.generate(PROMPTS[:3], SamplingParams(temperature=0, max_tokens=48, ignore_eos=True), use_tqdm=False)
    folder = Path(__file__).parent
    step = most_informative_step(trace)
    (folder / "cache_pages.svg").write_text(CachePagesView(trace).to_svg(step=step) + "\n", encoding="utf-8")
    (folder / "token_acceptance.svg").write_text(AcceptanceStrip(trace).to_svg() + "\n", encoding="utf-8")


def most_informative_step(trace: Trace) -> int:
    """The last step in which three requests ran, none ended, and at least two drafts were rolled back."""
    step = running = found = wrong = 0
    for event in trace:
        if isinstance(event, StepRan):
            step, running, wrong = event.step, len(event.work), 0
        elif isinstance(event, TokensCommitted):
            wrong += event.num_drafts - event.num_accepted
        elif isinstance(event, RequestFinished):
            running = 0
        elif isinstance(event, StepFinished) and running == 3 and wrong >= 2:
            found = step
    return found


if __name__ == "__main__":
    main()
