"""Draft heads beside the embedding and the unembedding of one target: a round, and the chains drawn from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from minillm.models.decoder import Decoder
from minillm.ops.linear import linear
from minillm.ops.transfer import indices_on_device
from minillm.quantization.base import QuantizedLinear
from minillm.speculative.draft_heads import KINDS, DraftHeads


@dataclass(frozen=True)
class HeadsRound:
    """What the heads know before the first draft of a round."""

    num_drafts: list[int]
    """Of each request, after the cut."""
    logits: Tensor
    """W sᵢ: `[num_requests, max(num_drafts), vocab]`."""
    contexts: Tensor
    """Pᵢ c: `[num_requests, max(num_drafts), token_rank]`."""


def unembedding(target: Decoder, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """The target's unembedding as a function, in `dtype`. It stays valid when an executor takes the model's weights."""
    head = target.lm_head
    if isinstance(head, QuantizedLinear):
        return head
    weight = head.weight.detach().to(dtype)
    return lambda x: linear(x, weight)


class TargetHeads:
    """Heads beside the embedding and the unembedding of one target, with all products that can be made once."""

    def __init__(self, heads: DraftHeads, embedding: Tensor, unembedding: Callable[[Tensor], Tensor]) -> None:
        """`embedding`: `[vocab, hidden]`; `unembedding`: `[n, hidden]` → `[n, vocab]`."""
        self.heads, self.embedding, self.unembedding = heads, embedding, unembedding
        self.dtype = heads.down.weight.dtype
        with torch.inference_mode():
            parts = [heads.tokens(rows.to(self.dtype)) for rows in embedding.split(8192)]
            self.token_table = torch.cat(parts)
            """Q e of every token: `[vocab, token_rank]`."""
            self.narrow = unembedding(heads.up.weight.T.contiguous()).T.contiguous()
            """W D: `[vocab, token_rank]`."""

    @torch.inference_mode()
    def begin(self, hidden: Tensor, last: Tensor, most: Sequence[int], kind: int, min_survival: float) -> HeadsRound:
        """Start a round. `hidden`: `[n, hidden]`; `last`: `[n]` int64, the last tokens; `most`: most drafts of each;
        `kind`: the row of `KINDS` whose confidences cut the chains."""
        c = self.heads.trunk(hidden.to(self.dtype), F.embedding(last, self.embedding).to(self.dtype))
        most = [min(k, self.heads.shape.num_drafts) for k in most]
        if min_survival > 0:
            alive = (self.heads.survival(c)[:, kind] >= min_survival).sum(-1).tolist()
            most = [min(pair) for pair in zip(most, alive, strict=True)]
        longest = max(most)
        if not longest:
            return HeadsRound(most, c[:0], c[:0])
        vectors = self.heads.positions(c, longest)
        logits = self.unembedding(vectors.flatten(0, 1)).unflatten(0, (-1, longest))
        return HeadsRound(most, logits, self.heads.contexts(c)[:, :longest])

    @torch.inference_mode()
    def next_logits(
        self, logits: Tensor, context: Tensor, previous: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The logits of one draft and zᵢ. `logits`: W sᵢ, `context`: Pᵢ c; `previous`: `[n]`, the tokens before it;
        `state`: zᵢ₋₁."""
        state = self.heads.next_state(context, F.embedding(previous, self.token_table), state)
        return logits + F.linear(state, self.narrow), state

    @torch.inference_mode()
    def draft_argmax(self, hidden: Tensor, last: Tensor, most: Sequence[int], min_survival: float) -> list[list[int]]:
        """The argmax at every position; the arguments are those of `begin`. Reads the tokens once, at the end."""
        begun = self.begin(hidden, last, most, KINDS.index("greedy"), min_survival)
        if not any(begun.num_drafts):
            return [[] for _ in most]
        tokens, previous, state = [], last, None
        for i in range(begun.logits.shape[1]):
            logits, state = self.next_logits(begun.logits[:, i], begun.contexts[:, i], previous, state)
            previous = logits.argmax(-1)
            tokens.append(previous)
        drafted = torch.stack(tokens, dim=1).tolist()
        return [row[:count] for row, count in zip(drafted, begun.num_drafts, strict=True)]


class Chains:
    """The states of several chains whose tokens are drawn outside."""

    def __init__(self, heads: TargetHeads, begun: HeadsRound, rows: Tensor, last: Tensor) -> None:
        """`rows`: which requests of the round draft, `[n]` int64."""
        self.heads, self.position = heads, 0
        self.logits, self.contexts = begun.logits.index_select(0, rows), begun.contexts.index_select(0, rows)
        self.active = list(range(len(rows)))
        """The chains that `state` is of."""
        self.first_logits, self.state = heads.next_logits(
            self.logits[:, 0], self.contexts[:, 0], last.index_select(0, rows), None
        )

    def next_logits(self, active: Sequence[int], previous: Tensor) -> Tensor:
        """The logits of the next draft of these chains, `[len(active), vocab]`. `previous`: their drafts before it."""
        self.position += 1
        if len(active) < len(self.active):
            kept = indices_on_device([self.active.index(i) for i in active], previous.device)
            self.state, self.active = self.state.index_select(0, kept), list(active)
            self.logits, self.contexts = self.logits.index_select(0, kept), self.contexts.index_select(0, kept)
        logits, context = self.logits[:, self.position], self.contexts[:, self.position]
        found, self.state = self.heads.next_logits(logits, context, previous, self.state)
        return found
