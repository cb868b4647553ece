"""The target drafts for itself with weights in four bits (QuantSpec: Tiwari et al. 2025).

    draft      weights in INT4, reads     the upper nibbles ┐
    target     its own weights, reads     both nibbles      ┴ of one KV cache, layout `paged_two_level`

A quantised copy of the target mostly agrees with it (the paper: over 90% of its drafts are accepted), and it needs no
KV cache of its own: it reads the keys and values that the target computed. With the two-level layout it reads 5 of the
9 bits of a number; with any other paged layout it reads what the target reads. The output is that of the target over
the same cache layout without speculation, so a quantised layout is its own reference.

`paged_two_level` says how the cache differs from the paper's. Of the weights, those of the layers' linears are in
INT4 groups; the embedding and the unembedding are not.

Wins: where a step waits for memory, weights or cache. Loses: where it waits for arithmetic, for which four bits are as
many operations as sixteen; and the quantised copy of the weights takes memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from minillm.batch import Segment
from minillm.errors import ConfigError
from minillm.models.hub import resolve
from minillm.models.loading import stored_scheme
from minillm.request import Request
from minillm.speculative.chain_drafter import check_quantization, check_sample_method
from minillm.speculative.drafter import DraftContext, TargetInfo
from minillm.speculative.self_drafter import SelfDrafter


@dataclass(frozen=True)
class SelfQuantOptions:
    """The options of method `self_quant`, minillm's own."""

    quantization: str | None = "int4"
    """Quantisation of the draft's weights (`int4`, `int8`, …); None: the target's own weights, so that only the cache
    differs."""
    draft_sample_method: str = "probabilistic"
    """`probabilistic` samples drafts from the quantised model's distribution, `greedy` takes its argmax."""

    def __post_init__(self) -> None:
        check_sample_method(self.draft_sample_method)
        check_quantization(self.quantization)

    def check_target(self, target: TargetInfo) -> None:
        """See `Drafter.Options`."""
        stored = stored_scheme(resolve(target.name))
        if stored is not None and self.quantization not in (None, stored.method):
            raise ConfigError(
                f"speculative method 'self_quant' cannot quantise {target.name} with {self.quantization!r}: it is "
                f"quantised with {stored.method!r}; give 'quantization': None to draft with its own weights, or load "
                "the original checkpoint"
            )


class SelfQuantDrafter(SelfDrafter):
    """A quantised copy of the target over the target's cache."""

    Options = SelfQuantOptions

    @classmethod
    def build(cls, context: DraftContext) -> SelfQuantDrafter:
        """See `Drafter.build`. Raises what `DraftContext.load_model` raises."""
        options = context.options
        model = context.target.model
        if options.quantization is not None:
            model = context.load_model(context.target_name, options.quantization)
        return cls(context.share_cache(model), options.draft_sample_method == "greedy")

    def first_segment(self, request: Request) -> Segment:
        """See `SelfDrafter.first_segment`."""
        return Segment(request.token_ids[-1:], request.num_tokens - 1, request.block_table)
