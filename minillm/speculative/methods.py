"""All speculative methods by name. A new method is a file with a `Drafter` and a line here."""

from __future__ import annotations

from minillm.speculative.draft_model import DraftModelDrafter
from minillm.speculative.draft_tree import DraftTreeDrafter
from minillm.speculative.drafter import Drafter
from minillm.speculative.heads import HeadsDrafter
from minillm.speculative.long import LongDrafter
from minillm.speculative.ngram import NgramDrafter
from minillm.speculative.prompt_tokens import PromptTokensDrafter
from minillm.speculative.self_quant import SelfQuantDrafter
from minillm.speculative.self_sparse import SelfSparseDrafter
from minillm.speculative.spire import SpireDrafter
from minillm.speculative.staged import StagedDrafter
from minillm.speculative.suffix import SuffixDrafter

METHODS: dict[str, type[Drafter]] = {
    "draft_model": DraftModelDrafter,
    "draft_tree": DraftTreeDrafter,
    "heads": HeadsDrafter,
    "long": LongDrafter,
    "ngram": NgramDrafter,
    "prompt_tokens": PromptTokensDrafter,
    "self_quant": SelfQuantDrafter,
    "self_sparse": SelfSparseDrafter,
    "spire": SpireDrafter,
    "staged": StagedDrafter,
    "suffix": SuffixDrafter,
}
