"""Trained drafters for the tiny target: what tests of each method call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

from minillm import LLM, SamplingParams
from minillm.models.fingerprint import fingerprint_of_folder
from minillm.models.loading import load_model
from minillm.speculative.draft_heads import DraftHeads
from minillm.speculative.trained_drafter import drafter_config, save_drafter
from minillm.trace import TokensCommitted
from minillm.training.heads_loss import heads_loss
from minillm.training.target_states import TargetStates, target_states
from minillm.training.trained_drafters import TRAINED
from tests.conftest import TinyPair
from tests.speculative.self_drafting import GREEDY, PROMPTS

Edit = Callable[[nn.Module], None]
Params = SamplingParams | Sequence[SamplingParams]


def saved(tiny: TinyPair, method: str, folder: Path, edit: Edit | None = None) -> Path:
    """A folder of new weights of a trained drafter for the tiny target, changed by `edit`."""
    target = load_model(tiny.target, torch.float32)
    module = TRAINED[method].new_module(target)
    if edit is not None:
        edit(module)
    config = drafter_config(method, "tiny", fingerprint_of_folder(tiny.target), target.config.vocab_size, module.shape)
    save_drafter(folder, config, module)
    return folder


def heads_that_know_the_tests(
    tiny: TinyPair, folder: Path, steps: int, prompts: Sequence[str] = PROMPTS, params: Params = GREEDY
) -> Path:
    """Heads that have learnt the target's text after the prompts of the tests by heart, more or less. The text of a
    random target is chaotic: nothing learnt on other text would help."""
    target = load_model(tiny.target, torch.float32)
    text = [
        [*o.prompt_token_ids, *o.outputs[0].token_ids]
        for o in LLM(str(tiny.target)).generate(prompts, params, use_tqdm=False)
    ]
    longest = max(map(len, text))
    tokens = torch.tensor([[*row, *[0] * (longest - len(row))] for row in text])
    states, following = target_states(target, tokens[:, :-1]), tokens[:, 1:]

    def learn(heads: DraftHeads) -> None:
        optimizer = torch.optim.AdamW(heads.parameters(), lr=1e-2)
        for _ in range(steps):
            for first in range(heads.shape.num_drafts):  # every token is a root in one of these
                optimizer.zero_grad()
                later = TargetStates(*(part[:, first:].detach() for part in states))
                heads_loss(heads, target, later, following[:, first:]).backward()
                optimizer.step()

    return saved(tiny, "heads", folder, learn)


def acceptance(llm: LLM, params: SamplingParams = GREEDY) -> float:
    """The share of accepted drafts when all prompts run together."""
    with llm.trace() as trace:
        llm.generate(PROMPTS, params, use_tqdm=False)
    judged = [e for e in trace.of(TokensCommitted) if e.num_drafts]
    return sum(e.num_accepted for e in judged) / max(1, sum(e.num_drafts for e in judged))
