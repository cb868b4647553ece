"""What each idea of a trained drafter is worth: drafters with one of them left out, trained alike and compared.

Every variant of a method sees the same tokens in the same order, and is measured on the same held-out code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from tqdm import tqdm

from minillm.errors import TrainingError
from minillm.models.decoder import Decoder
from minillm.models.fingerprint import fingerprint_of_folder
from minillm.training.data import Passes, Windows
from minillm.training.drafter_evaluation import CODE_LENGTH, CODE_ROWS, Acceptance, Guesses, acceptance
from minillm.training.drafter_stages import DrafterTarget, drafter_target
from minillm.training.pair import Pair
from minillm.training.pretrain import Loss, Trainer
from minillm.training.prompt_tokens_loss import PromptTokensLoss
from minillm.training.record import Hardware
from minillm.training.rollouts import LongLoss, SpireLoss, long_guesses, spire_guesses
from minillm.training.stage_inputs import check_inputs
from minillm.training.stage_runs import as_shipped, run_to_the_end
from minillm.training.state_files import write_json
from minillm.training.trained_drafters import TRAINED, guesses_of_prompts, new_long, new_prompt_tokens, new_spire

if TYPE_CHECKING:
    from rich.table import Table

TOKENS = 1_000_000
"""Training tokens of each variant."""
CODE, LATE = "held-out code", "the same at late positions"


@dataclass(frozen=True)
class Variant:
    """A draft with one idea left out."""

    new_module: Callable[[Decoder], nn.Module]
    loss: Callable[[Decoder], Loss]
    guesses: Mapping[str, Guesses]
    """Kind of text → what it drafts there."""


_SPIRE = {CODE: spire_guesses}
_LONG = {CODE: long_guesses, LATE: partial(long_guesses, offsets=True)}
_PROMPTS = {CODE: guesses_of_prompts}
VARIANTS: dict[str, dict[str, Variant]] = {
    "spire": {
        "spire": Variant(new_spire, SpireLoss, _SPIRE),
        "no feedback memory": Variant(partial(new_spire, feedback=False), SpireLoss, _SPIRE),
        "no sparse mask": Variant(partial(new_spire, window=None), SpireLoss, _SPIRE),
        "not from the target": Variant(partial(new_spire, from_target=False), SpireLoss, _SPIRE),
    },
    "long": {
        "long": Variant(new_long, LongLoss, _LONG),
        "no cross-attention": Variant(partial(new_long, cross_attention=False), LongLoss, _LONG),
        "no offsets": Variant(new_long, partial(LongLoss, offsets=False), _LONG),
    },
    "prompt_tokens": {
        "prompt_tokens": Variant(new_prompt_tokens, PromptTokensLoss, _PROMPTS),
        "no distillation": Variant(new_prompt_tokens, partial(PromptTokensLoss, distilled=False), _PROMPTS),
        "prompt tokens alone": Variant(
            new_prompt_tokens,
            partial(PromptTokensLoss, alone=True),
            {CODE: partial(guesses_of_prompts, alone=True)},
        ),
    },
}
"""Method → its variants, the whole one first."""


@dataclass(frozen=True)
class Row:
    """One variant on one kind of text."""

    variant: str
    text: str
    tokens: int
    """Tokens that it was trained on."""
    acceptance: Acceptance


def run_ablations(pair: Pair, method: str, tokens: float = TOKENS, rows: int = CODE_ROWS) -> list[Row]:
    """Train the variants of `method` in turn, each on `tokens` tokens, and measure them on `rows` rows of held-out
    code.

    A variant that is finished is only measured. The result is also written to `ablations-METHOD.json` in the folder of
    the pair, as JSON values: the method, the target and the fingerprint of its weights, the hardware, and `rows`.
    Raises `TrainingError` for a method without variants.
    """
    if method not in VARIANTS:
        raise TrainingError(f"there are no ablations of {method!r}; there are those of {', '.join(VARIANTS)}")
    target, found = drafter_target(pair), []
    for name, variant in VARIANTS[method].items():
        found += _measured(pair, method, target, name, variant, tokens, rows)
    file = pair.folder / f"ablations-{method}{target.suffix}.json"
    made_of = {"method": method, "target": target.name, "fingerprint": fingerprint_of_folder(target.checkpoint)}
    rows_of = {"sure_drafts": TRAINED[method].sure_drafts, "rows": [asdict(row) for row in found]}
    write_json(file, {**made_of, "hardware": asdict(Hardware.here(pair.device)), **rows_of})
    return found


def _measured(
    pair: Pair, method: str, target: DrafterTarget, name: str, variant: Variant, tokens: float, rows: int
) -> list[Row]:
    folder = _folder(pair, method, target, name)
    check_inputs(folder, {"target": target.weights})
    recipe = replace(TRAINED[method].recipe(math.inf), tokens=tokens)
    module = variant.new_module(target.model).to(pair.device)
    loss, pause_file = variant.loss(target.model), pair.folder / "pause"
    trainer = Trainer(module, Passes(target.corpus), recipe, folder, loss, pause_file=pause_file)
    run_to_the_end(name, trainer)
    text = Windows(target.corpus, "held_out").in_order(4, CODE_LENGTH)[: max(1, rows // 4)]
    as_shipped(module)
    return [
        Row(name, kind, trainer.tokens_seen, acceptance(guesses, module, target.model, text))
        for kind, guesses in variant.guesses.items()
    ]


def _folder(pair: Pair, method: str, target: DrafterTarget, name: str) -> Path:
    return pair.folder / f"ablations-{method}{target.suffix}" / name.replace(" ", "-")


def table(method: str, rows: Sequence[Row]) -> Table:
    """Acceptance by position at temperature 0, and tokens per round at both temperatures."""
    from rich.table import Table

    made = Table(title=f"ablations of {method}: acceptance by position at temperature 0, tokens per round")
    count, sure = len(rows[0].acceptance.greedy), TRAINED[method].sure_drafts
    for heading in ("variant", "text", *(f"draft {sure + i + 1}" for i in range(count)), "T = 0", "T = 1"):
        made.add_column(heading, justify="left" if heading in ("variant", "text") else "right")
    for row in rows:
        found = row.acceptance
        gained = [f"{sure + found.tokens_per_round(rates):.2f}" for rates in (found.greedy, found.sampled)]
        made.add_row(row.variant, row.text, *(f"{rate:.1%}" for rate in found.greedy), *gained)
    return made


def print_ablations(pair: Pair, methods: Sequence[str], **options: Any) -> None:
    """Run the ablations of some methods and print a table of each."""
    from rich.console import Console

    for method in methods:
        rows = run_ablations(pair, method, **options)
        with tqdm.external_write_mode():
            Console().print(table(method, rows))
