"""All speculative methods by name. A new method is a file with a `Drafter` and a line here."""

from __future__ import annotations

from minillm.speculative.draft_model import DraftModelDrafter
from minillm.speculative.draft_tree import DraftTreeDrafter
from minillm.speculative.drafter import Drafter
from minillm.speculative.ngram import NgramDrafter
from minillm.speculative.self_quant import SelfQuantDrafter
from minillm.speculative.self_sparse import SelfSparseDrafter
from minillm.speculative.staged import StagedDrafter
from minillm.speculative.suffix import SuffixDrafter

METHODS: dict[str, type[Drafter]] = {
    "draft_model": DraftModelDrafter,
    "draft_tree": DraftTreeDrafter,
    "ngram": NgramDrafter,
    "self_quant": SelfQuantDrafter,
    "self_sparse": SelfSparseDrafter,
    "staged": StagedDrafter,
    "suffix": SuffixDrafter,
}
