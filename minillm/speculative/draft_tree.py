"""Drafting a tree with a small model: several drafts per position, so that one rejection does not end the round.

    branching (2, 2, 2)        root ─┬─ a ─┬─ c ─┬─ g        14 drafts, 8 paths of 3 tokens;
                                     │     │     └─ h        the target verifies all of them in one forward
                                     │     └─ d …
                                     └─ b ─── …

A level costs one forward of the draft model over the last committed token and the whole tree so far. These are only a
few tokens, so the tree need not be kept in the draft's cache. If all trees of a step are chains of argmaxes, they are
drafted as `draft_model` drafts them, each draft over the cached ones before it.

Children of a node are the draft model's top-k: deterministic, so the exact rule accepts a draft x with probability
p(x); after a rejection, its siblings are judged against the residual of p. (SpecInfer: Miao et al. 2024.) With
`draft_sample_method="probabilistic"`, a sampled request's children are drawn from q without replacement, as in Sequoia
(Chen et al. 2024): the second from q without the first, renormalised. These are accepted more often at temperature 1,
where the target's token is rarely the most probable one.

The shape is fixed (`tree_branching`, `speculative_token_tree`), or follows from the acceptance measured so far
(`tree_shape="measured"`: see `measured_shape` and `tree_shape`).

Wins: where verifying more tokens costs little (large models, few requests) and the target's token is often the draft
model's second choice. Loses: where verification is compute-bound, or nearly all or nearly no drafts are accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor

from minillm.batch import MAX_TREE_TOKENS, Segment
from minillm.errors import NonFiniteLogitsError
from minillm.request import Request
from minillm.runtime.runner import ModelRunner, check_finite
from minillm.sampling import Draw, probs_from_logits, sample, uniform
from minillm.speculative.chain_drafter import warn_of_broken_logits
from minillm.speculative.draft_model import DraftModelDrafter, DraftProgress
from minillm.speculative.draft_tree_options import DraftTreeOptions
from minillm.speculative.drafter import Draft, DraftContext
from minillm.speculative.measured_shape import MeasuredShapes
from minillm.speculative.rejection_sampler import Verdict, path_to
from minillm.speculative.tree_shape import TreeShape


class DraftTreeDrafter(DraftModelDrafter):
    """Drafts a tree of tokens per request. All requests form one batch, with one draft forward per level."""

    Options = DraftTreeOptions
    proposes_trees = True

    def __init__(
        self, runner: ModelRunner, max_num_batched_tokens: int, greedy: bool, shapes: TreeShape | MeasuredShapes
    ) -> None:
        super().__init__(runner, max_num_batched_tokens, greedy)
        self.shapes = shapes
        """The shape of all trees, or where to ask for the shape of the next one."""
        self.max_drafts = shapes.num_nodes if isinstance(shapes, TreeShape) else shapes.max_nodes

    @classmethod
    def build(cls, context: DraftContext) -> DraftTreeDrafter:
        """See `Drafter.build`."""
        options = context.options
        runner = context.new_runner(context.load_model(options.model, options.quantization))
        shapes = options.fixed_shape
        if options.is_measured:
            costs = options.tree_draft_cost, options.verify_cost
            shapes = MeasuredShapes(options.tree_nodes, options.tree_levels, *costs)
        return cls(runner, context.max_num_batched_tokens, options.draft_sample_method == "greedy", shapes)

    @classmethod
    def default_num_drafts(cls, options: DraftTreeOptions) -> int:
        """The size of a full tree."""
        return options.num_nodes

    def judged(self, request: Request, draft: Draft, verdict: Verdict) -> None:
        """See `Drafter.judged`."""
        if not isinstance(self.shapes, MeasuredShapes):
            return
        if draft.parents is None:
            self.shapes.judged(request, range(-1, len(draft.token_ids) - 1), range(verdict.num_accepted))
        else:
            self.shapes.judged(request, draft.parents, verdict.path or ())

    def _shape_for(self, request: Request, most: int) -> TreeShape:
        """The shape of the next tree, with at most `most` nodes."""
        return self.shapes.cut(most) if isinstance(self.shapes, TreeShape) else self.shapes.shape_for(request, most)

    def _propose(self, requests: Sequence[Request], num_drafts: Sequence[int]) -> list[Draft]:
        shapes = [self._shape_for(request, most) for request, most in zip(requests, num_drafts, strict=True)]
        if self.is_greedy(requests) and all(shape.is_chain for shape in shapes):
            return super()._propose(requests, [shape.num_nodes for shape in shapes])
        for request in requests:
            self.num_computed_tokens(request)
        trees = [DraftTree(request, shape) for request, shape in zip(requests, shapes, strict=True)]
        logits = self._catch_up(requests)
        growing = trees
        while growing:
            try:
                self._grow(growing, logits)
            except NonFiniteLogitsError as problem:  # nodes that were drawn stay, as in `draw_chains`
                warn_of_broken_logits(self, problem)
                break
            growing = [tree for tree in growing if tree.can_grow]
            if growing:
                logits = self.runner.run([self._tree_segment(tree) for tree in growing])
        for request in requests:
            self._progress[request] = DraftProgress(request.num_tokens)
        return [tree.draft for tree in trees]

    def _grow(self, trees: Sequence[DraftTree], logits: Tensor) -> None:
        """Add a level to each tree. `logits`: `[nodes of the trees' last levels, vocab]`."""
        nodes = [(tree, node, tree.num_wanted(node)) for tree in trees for node in tree.last_level]
        sampled = [i for i, (tree, _, _) in enumerate(nodes) if not (self.greedy or tree.request.params.is_greedy)]
        tokens: list[list[int]] = [[] for _ in nodes]
        probs: list[list[Tensor]] = [[] for _ in nodes]
        if len(sampled) < len(nodes):
            check_finite(logits)
            most = max(count for _, _, count in nodes)
            tokens = logits.topk(min(most, logits.shape[-1]), dim=-1).indices.tolist()
        if sampled:
            drawn = draw_siblings(logits[sampled], [nodes[i] for i in sampled])
            for i, some, q in zip(sampled, *drawn, strict=True):
                tokens[i], probs[i] = some, q
        children = iter(zip(tokens, probs, strict=True))
        for tree in trees:
            tree.grow(*zip(*islice(children, len(tree.last_level)), strict=True))

    def _tree_segment(self, tree: DraftTree) -> Segment:
        """The segment of the last committed token and the tree. Drops the hashes of the blocks that the tree is written
        to, because its nodes may be rejected."""
        request, size = tree.request, self.runner.block_size
        start = request.num_tokens - 1
        for index in range((start + 1) // size, (start + len(tree.token_ids)) // size + 1):
            self._filled.pop(request.block_table[index], None)
        tokens = [request.token_ids[-1], *tree.token_ids]
        return Segment(tokens, start, request.block_table, len(tree.last_level), tree.parents)


def draw_siblings(
    logits: Tensor,  # [len(nodes), vocab]
    nodes: Sequence[tuple[DraftTree, int, int]],  # a tree, one of its nodes, how many children to draw
) -> tuple[list[list[int]], list[list[Tensor]]]:
    """Draw children from q without replacement, by each request's own uniforms.

    Returns for each node the tokens and, `[vocab]` each, the distributions that they were drawn from: q without the
    siblings before, renormalised. There are fewer tokens than wanted if q has no more.
    """
    q = probs_from_logits(logits, [tree.request.sampling_row(tree.path_to(node)) for tree, node, _ in nodes])
    tokens: list[list[int]] = [[] for _ in nodes]
    probs: list[list[Tensor]] = [[] for _ in nodes]
    for rank in range(max(count for _, _, count in nodes)):
        left = q.sum(dim=-1)
        rows = [i for i, mass in enumerate(left.tolist()) if mass > 0 and rank < nodes[i][2]]
        if not rows:
            break
        q = q / left[:, None]
        drawn = sample(q[rows], [_uniform(*nodes[i][:2], rank) for i in rows])
        for i, token in zip(rows, drawn.tolist(), strict=True):
            tokens[i].append(token)
            probs[i].append(q[i])
        q = q.clone()
        q[rows, drawn] = 0.0
    return tokens, probs


def _uniform(tree: DraftTree, parent: int, rank: int) -> float:
    """The number that draws one child. Keyed by the round and the place in the tree: no two drafts share a number."""
    place = (parent + 1) * MAX_TREE_TOKENS + rank
    return uniform(tree.request.seed, tree.request.num_tokens, Draw.DRAFT, place)


class DraftTree:
    """A draft tree that grows level by level into its shape."""

    def __init__(self, request: Request, shape: TreeShape) -> None:
        self.request, self.shape = request, shape
        self.token_ids: list[int] = []
        self.parents: list[int] = []
        self.probs: list[Tensor] = []
        """The distribution that each draft was drawn from; empty for deterministic drafts."""
        self.last_level: list[int] = [-1]
        """The nodes that get children next; -1: the last committed token."""
        self._place: dict[int, int] = {-1: -1}
        """Node → its index in the shape. The shape may be in another order, and a node may be missing here."""

    @property
    def can_grow(self) -> bool:
        """Whether the shape has another level."""
        return any(map(self.num_wanted, self.last_level))

    def num_wanted(self, node: int) -> int:
        """The number of children that the shape has for this node."""
        return self.shape.num_children(self._place[node])

    @property
    def draft(self) -> Draft:
        """The tree so far."""
        return Draft(self.token_ids, torch.stack(self.probs) if self.probs else None, self.parents)

    def path_to(self, node: int) -> list[int]:
        """The drafts from the root to `node`."""
        return path_to(node, self.token_ids, self.parents)

    def grow(self, children: Sequence[Sequence[int]], probs: Sequence[Sequence[Tensor]]) -> None:
        """Add children to each node of the last level, at most as many as the shape has. `probs`: see `draw_siblings`;
        an empty list for deterministic children."""
        first = len(self.token_ids)
        for node, tokens, rows in zip(self.last_level, children, probs, strict=True):
            places = [at for at, parent in enumerate(self.shape.parents) if parent == self._place[node]]
            for place, token in zip(places, tokens, strict=False):
                self._place[len(self.token_ids)] = place
                self.token_ids.append(token)
                self.parents.append(node)
            self.probs += rows[: len(places)]
        self.last_level = list(range(first, len(self.token_ids)))
