"""The interface of all drafters. A drafter only proposes tokens; the rejection sampler decides which are accepted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from minillm.errors import DraftError
from minillm.models.config import ModelConfig
from minillm.models.decoder import Decoder
from minillm.request import Request
from minillm.runtime.runner import ModelRunner
from minillm.speculative.rejection_sampler import Verdict
from minillm.tokenizer import Tokenizer


@dataclass(frozen=True)
class Draft:
    """Draft tokens for one request: a chain or a tree.

    parents = [-1, -1, 0, 0, 1]           root = the last committed token

        root ─┬─ 0 ─┬─ 2
              │     └─ 3
              └─ 1 ─── 4
    """

    token_ids: list[int]
    """The draft tokens; for a chain, in order. May be empty."""
    probs: Tensor | None = None
    """`[len(token_ids), vocab]` fp32: the distribution each draft was sampled from. For siblings drawn without
    replacement, it is conditional on the siblings before. None: the drafts are deterministic."""
    parents: list[int] | None = None
    """The index of each draft's parent, -1 for the last committed token. Parents come before their children; siblings
    are judged in order. None: a chain, in which each draft follows the one before."""


NO_DRAFT = Draft([])
"""No draft, and no model was run for it, so it took next to no time. See `Drafter.runs_model`."""


@dataclass(frozen=True)
class NoOptions:
    """The options of a method that has none."""


@dataclass(frozen=True)
class TargetInfo:
    """What is known of the target and its engine before any model is loaded."""

    name: str
    config: ModelConfig
    tokenizer: Tokenizer
    block_size: int
    max_model_len: int


@dataclass(frozen=True)
class DraftContext:
    """What a drafter is built from. KV cache pools are allocated after all drafters have been built."""

    options: Any
    """An instance of the drafter's `Options`."""
    target: ModelRunner
    """The runner of the target model. Its cache exists from the first `propose` on."""
    target_name: str
    """The name of the target model, for `load_model`."""
    tokenizer: Tokenizer
    max_num_batched_tokens: int
    """Most tokens in one forward pass."""
    load_model: Callable[[str, str | None], Decoder]
    """`(name, quantization)` → a model with the target's vocabulary and dtype and at least its context length. Raises
    `TokenizerMismatchError` or `ConfigError`."""
    new_runner: Callable[..., ModelRunner]
    """`(model, layout=None, **layout_options)` → a runner with its own cache, addressed by the same block tables.
    `layout`: a `KVCache` class; None: the target's, with its options. The model may be the target's."""
    share_cache: Callable[[Decoder], ModelRunner]
    """`(model)` → a runner over the target's own cache (`KVCache.draft_view`), for a model with the target's layers and
    KV heads."""


class Drafter(ABC):
    """Proposes draft tokens. `speculative_config={"method": MyDrafter}` selects your own class."""

    Options: ClassVar[type] = NoOptions
    """A dataclass with the options of this method in `speculative_config`. It validates itself on construction. If it
    has a method `check_target(target: TargetInfo) -> int | None`, that is called before any model is loaded, to refuse
    options that do not fit the target. It returns `max_drafts`."""
    runs_model: ClassVar[bool] = False
    """Whether it runs a model. Then an adaptive policy counts a round without a draft as time lost, unless `propose`
    has returned `NO_DRAFT`, this very object. A lookup that finds nothing costs next to nothing, and loses nothing."""
    proposes_trees: ClassVar[bool] = False
    """Whether it may propose trees, which only some cache layouts can verify."""
    needs_blocks: ClassVar[bool] = False
    """Whether it reads the blocks of the target's cache. Layouts for whole sequences have none to choose from."""
    reads_target_cache: bool = False
    """Whether it reads keys or values that the target has stored (`KVCache.stored_rows`), which not every layout
    shows."""
    num_observed_queries: int = 0
    """Of how many last tokens of a prompt `observe` gets the queries; 0: it is not called."""
    observes_hidden: bool = False
    """Whether `observe_hidden` is called."""
    max_drafts: int | None = None
    """The most tokens that it can propose per round; None: any number."""

    @classmethod
    def build(cls, context: DraftContext) -> Drafter:
        """Return the drafter for one engine. The default calls the constructor without arguments."""
        return cls()

    @classmethod
    def default_num_drafts(cls, options: Any) -> int:
        """Most drafts per round if `num_speculative_tokens` is not given."""
        return 4

    @abstractmethod
    def propose(self, requests: Sequence[Request], num_drafts: Sequence[int]) -> list[Draft]:
        """For each request i, propose at most `num_drafts[i]` (≥ 1) tokens that may follow `requests[i].token_ids`.

        The request's block table already has blocks for all of them.
        """

    def propose_for_timing(self, requests: Sequence[Request], num_drafts: Sequence[int]) -> list[Draft]:
        """Called instead of `propose` when an engine with `adaptive` starts: with made-up requests, to measure how long
        drafting takes. Make as many drafts as asked for, if that is possible, and count none of them."""
        return self.propose(requests, num_drafts)

    def observe(self, request: Request, queries: Tensor) -> None:  # noqa: B027
        """Called in the step that completes the request's prompt (or, after a preemption, all its tokens), when its
        keys are in the cache.

        `queries`: those of its last tokens as attention got them, `[num_layers, n, num_heads, head_dim]` with
        1 ≤ n ≤ `num_observed_queries`. n is smaller if the step computed fewer of its tokens.
        """

    def observe_hidden(self, requests: Sequence[Request], hidden: Tensor) -> None:  # noqa: B027
        """Called at the end of each step with the requests that have gained tokens in it and go on.

        `hidden`: `[len(requests), hidden]`, for each request the target's hidden state after the final norm at its last
        token but one: the vector from which the target's unembedding made the distribution of the last token. An
        interrupt may skip the call, and it is left out where the draft policy plans no drafts for the next step
        (`DraftPolicy.may_draft_next`). So a drafter records for how many tokens it holds.
        """

    def judged(self, request: Request, draft: Draft, verdict: Verdict) -> None:  # noqa: B027
        """Called with the verdict on each draft that is not empty, once the request has gained its tokens; an interrupt
        may skip it. It tells what to draft next: for example, a tree learns which shape is accepted most."""

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:  # noqa: B027
        """Called when the engine copies blocks, `pairs` of (source, target). A drafter with its own KV cache copies its
        blocks, too."""

    def free_blocks(self, block_ids: Sequence[int]) -> None:  # noqa: B027
        """Called with blocks that have become empty."""

    def request_dropped(self, request: Request) -> None:  # noqa: B027
        """Called when a request has lost its blocks: it was preempted, it has ended, or a step was interrupted."""

    def request_finished(self, request: Request) -> None:  # noqa: B027
        """Called when a request has ended, for any reason."""


def checked_drafts(drafter: Drafter, requests: Sequence[Request], num_drafts: Sequence[int]) -> list[Draft]:
    """The drafts of `drafter`; `NO_DRAFT` for each that took no time.

    Raises `DraftError` unless there is one draft per request, at most as long as was asked for.
    """
    drafts = drafter.propose(requests, num_drafts)
    name = type(drafter).__name__
    if len(drafts) != len(num_drafts):
        raise DraftError(f"{name} proposed {len(drafts)} drafts for {len(num_drafts)} requests; return one for each")
    for draft, most in zip(drafts, num_drafts, strict=True):
        if len(draft.token_ids) > most:
            raise DraftError(
                f"{name} proposed {len(draft.token_ids)} drafts where at most {most} were asked for; there are no "
                "cache blocks for more"
            )
    return [draft if draft.token_ids or drafter.runs_model else NO_DRAFT for draft in drafts]
