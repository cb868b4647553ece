"""Drafting a tree with a small model: several drafts per position, so that one rejection does not end the round.

    branching (2, 2, 2)        root ─┬─ a ─┬─ c ─┬─ g        14 drafts, 8 paths of 3 tokens;
                                     │     │     └─ h        the target verifies all of them in one forward
                                     │     └─ d …
                                     └─ b ─── …

A level costs one forward of the draft model over the last committed token and the whole tree so far. These are only a
few tokens, so the tree need not be kept in the draft's cache. Drafts are the draft model's top-k and deterministic, so
the exact rule accepts a draft x with probability p(x); after a rejection, its siblings are judged against the residual
of p. (SpecInfer: Miao et al. 2024.)

Wins: where verifying more tokens costs little (large models, few requests) and the target's token is often the draft
model's second choice. Loses: where verification is compute-bound, or nearly all or nearly no drafts are accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from minillm.batch import MAX_TREE_TOKENS, Segment
from minillm.config import at_least
from minillm.errors import ConfigError
from minillm.request import Request
from minillm.speculative.draft_model import DraftModelDrafter, DraftProgress
from minillm.speculative.drafter import Draft, DraftContext


@dataclass(frozen=True)
class DraftTreeOptions:
    """The options of method `draft_tree`, minillm's own."""

    model: str | None = None
    """The draft model: a bundled name, a folder or a hub id."""
    quantization: str | None = None
    """Quantisation of its weights (`int8`, `w8a8`, …). Drafts need not be exact."""
    tree_branching: Sequence[int] = (2, 2, 2)
    """Number of children of each node, level by level."""

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("speculative method 'draft_tree' needs 'model', for example 'minicoder-draft'")
        if not isinstance(self.tree_branching, list | tuple) or not self.tree_branching:
            raise ConfigError(
                f"tree_branching={self.tree_branching!r} must list the children per node of each level: [2, 2, 2]"
            )
        for count in self.tree_branching:
            at_least("tree_branching's levels", count, 1)
        if self.num_nodes >= MAX_TREE_TOKENS:
            raise ConfigError(
                f"tree_branching={list(self.tree_branching)} makes {self.num_nodes} drafts, at most "
                f"{MAX_TREE_TOKENS - 1} can be verified at once; lower it"
            )

    @property
    def num_nodes(self) -> int:
        """Number of drafts in a full tree."""
        return sum(accumulate(self.tree_branching, mul))


class DraftTreeDrafter(DraftModelDrafter):
    """Drafts a tree of top-k tokens per request. All requests form one batch, with one draft forward per level."""

    Options = DraftTreeOptions
    proposes_trees = True
    branching: Sequence[int] = ()

    @classmethod
    def build(cls, context: DraftContext) -> DraftTreeDrafter:
        """See `Drafter.build`."""
        options = context.options
        runner = context.new_runner(context.load_model(options.model, options.quantization))
        drafter = cls(runner, context.max_num_batched_tokens, greedy=True)
        drafter.branching = tuple(options.tree_branching)
        return drafter

    @classmethod
    def default_num_drafts(cls, options: DraftTreeOptions) -> int:
        """The size of a full tree."""
        return options.num_nodes

    def _propose(self, requests: Sequence[Request], num_drafts: Sequence[int]) -> list[Draft]:
        for request in requests:
            self.num_computed_tokens(request)
        trees = [DraftTree(request, most) for request, most in zip(requests, num_drafts, strict=True)]
        logits = self._catch_up(requests)
        for level, count in enumerate(self.branching):
            growing = [tree for tree in trees if tree.has_room] if level else trees
            if not growing:
                break
            if level:
                logits = self.runner.run([self._tree_segment(tree) for tree in growing])
            best = iter(logits.topk(min(count, logits.shape[-1]), dim=-1).indices.tolist())
            for tree in growing:
                tree.grow([next(best) for _ in tree.last_level])
        for request in requests:
            self._progress[request] = DraftProgress(request.num_tokens)
        return [Draft(tree.token_ids, parents=tree.parents) for tree in trees]

    def _tree_segment(self, tree: DraftTree) -> Segment:
        """The segment of the last committed token and the tree. Drops the hashes of the blocks that the tree is written
        to, because its nodes may be rejected."""
        request, size = tree.request, self.runner.block_size
        start = request.num_tokens - 1
        for index in range((start + 1) // size, (start + len(tree.token_ids)) // size + 1):
            self._filled.pop(request.block_table[index], None)
        tokens = [request.token_ids[-1], *tree.token_ids]
        return Segment(tokens, start, request.block_table, len(tree.last_level), tree.parents)


class DraftTree:
    """A draft tree that grows level by level."""

    def __init__(self, request: Request, most: int) -> None:
        self.request, self.most = request, most
        self.token_ids: list[int] = []
        self.parents: list[int] = []
        self.last_level: list[int] = [-1]
        """The nodes that get children next; -1: the last committed token."""

    @property
    def has_room(self) -> bool:
        """Whether another level can be added."""
        return bool(self.last_level) and len(self.token_ids) < self.most

    def grow(self, children: Sequence[Sequence[int]]) -> None:
        """Add children to each node of the last level, until the tree has `most` nodes."""
        first = len(self.token_ids)
        for parent, token_ids in zip(self.last_level, children, strict=True):
            for token in token_ids[: self.most - len(self.token_ids)]:
                self.token_ids.append(token)
                self.parents.append(parent)
        self.last_level = list(range(first, len(self.token_ids)))
