"""The target drafts for itself with learned embeddings: its tokens, and its cache, are those of an undrafted run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from minillm import LLM
from minillm.batch import Segment
from minillm.errors import ConfigError, UnsupportedError
from minillm.models.loading import load_model
from minillm.training.prompt_tokens_loss import PromptAttention, PromptTokensLoss, prompted
from minillm.training.target_states import target_states
from minillm.training.trained_drafters import TRAINED
from tests.conftest import TinyPair
from tests.speculative.self_drafting import (
    FEWER_BITS,
    cache_is_that_of_a_plain_run,
    length_does_not_depend_on_what_is_drawn,
    stops_completions_aborts_and_later_requests_are_plain,
    survives_preemption_prefix_sharing_and_chunks,
    tokens,
    tokens_of_fewer_bits_are_those_undrafted,
)
from tests.speculative.three_tokens import expected_triples, p_of_triples
from tests.speculative.trained_drafting import acceptance, saved

PROMPTED: dict[str, Any] = {"method": "prompt_tokens", "num_speculative_tokens": 4}


@pytest.fixture(scope="module")
def folder(tiny: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tiny, "prompt_tokens", tmp_path_factory.mktemp("tiny-prompts"))


@pytest.fixture
def speculative(folder: Path) -> dict[str, Any]:
    return {**PROMPTED, "model": str(folder)}


def engine(tiny: TinyPair, speculative: dict[str, Any] | None, **options: Any) -> LLM:
    return LLM(str(tiny.target), block_size=4, enforce_eager=True, speculative_config=speculative, **options)


def test_greedy_tokens_are_the_targets(tiny: TinyPair, speculative: dict[str, Any]) -> None:
    llm = engine(tiny, speculative)
    assert tokens(llm) == tokens(engine(tiny, None))
    assert 0.25 < acceptance(llm) < 1


def test_the_first_draft_is_always_right(tiny: TinyPair, speculative: dict[str, Any]) -> None:
    """The draft forward computes the row of the last token: a wrong position, slot or cache would show here."""
    assert acceptance(engine(tiny, {**speculative, "num_speculative_tokens": 1})) == 1


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "top-k 1"])
def test_with_preemption_prefix_sharing_and_chunks(tiny: TinyPair, speculative: dict[str, Any], sampled: bool) -> None:
    survives_preemption_prefix_sharing_and_chunks(tiny, speculative, sampled, enforce_eager=True)


def test_completions_stops_and_aborts(tiny: TinyPair, speculative: dict[str, Any]) -> None:
    stops_completions_aborts_and_later_requests_are_plain(tiny, speculative, enforce_eager=True)


def test_the_cache_holds_what_a_plain_run_would_have_put_there(tiny: TinyPair, speculative: dict[str, Any]) -> None:
    cache_is_that_of_a_plain_run(tiny, speculative)


def test_prompt_rows_that_stay_in_the_cache_are_seen(tiny: TinyPair, speculative: dict[str, Any]) -> None:
    """A planted mistake: the drafter runs after the verification, too."""
    llm = engine(tiny, speculative)
    runner, drafter = llm.engine.runner, llm.engine.drafter
    real = runner.run
    calls = [0]

    def run(segments: Any) -> torch.Tensor:
        logits = real(segments)
        calls[0] += 1
        if calls[0] > 1 and all(token < 300 for s in segments for token in s.token_ids):
            prompts = [
                s.__class__([drafter.prompt_ids[0]] * len(s.token_ids), s.start, s.block_table) for s in segments
            ]
            real(prompts)
        return logits

    runner.run = run
    with pytest.raises(AssertionError):
        cache_is_that_of_a_plain_run(tiny, speculative, llm)


def test_sampled_text_follows_the_target(tiny: TinyPair, speculative: dict[str, Any]) -> None:
    """χ²; a correct engine fails with probability 1e-6 over the choice of seeds, which are fixed."""
    assert p_of_triples(tiny, expected_triples(tiny), speculative) > 1e-6


def test_the_length_of_a_chain_does_not_depend_on_what_is_drawn(tiny: TinyPair, speculative: dict[str, Any]) -> None:
    length_does_not_depend_on_what_is_drawn(engine(tiny, speculative, max_num_seqs=64))


def test_in_training_no_row_of_the_text_reads_a_prompt_token(tiny: TinyPair) -> None:
    target = load_model(tiny.target, torch.float32)
    module = TRAINED["prompt_tokens"].new_module(target)
    inputs = torch.randint(0, 300, (2, 31))
    states, logits = prompted(module, target, inputs)
    plain = target_states(target, inputs)  # in bf16 too, but summed in another order
    assert (states.hidden - plain.hidden).abs().max() < 0.05 * plain.hidden.abs().max()
    with torch.no_grad():
        module.embedding.weight.mul_(3)
    again, other = prompted(module, target, inputs)
    assert torch.equal(again.log_probs, states.log_probs) and not torch.allclose(other, logits, atol=0.1)


def test_a_mask_that_shows_prompt_tokens_to_others_is_seen(tiny: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted mistake: every later row attends to the prompt tokens."""
    target = load_model(tiny.target, torch.float32)
    module = TRAINED["prompt_tokens"].new_module(target)
    inputs = torch.randint(0, 300, (1, 31))
    right, _ = prompted(module, target, inputs)
    real = PromptAttention.__init__

    def leaky(self: PromptAttention, length: int, count: int, device: torch.device, alone: bool = False) -> None:
        real(self, length, count, device, alone)
        self.mask = self.positions.unsqueeze(1) >= self.positions

    monkeypatch.setattr(PromptAttention, "__init__", leaky)
    seen = prompted(module, target, inputs)[0].hidden
    assert (seen - right.hidden).abs().max() > 0.2 * right.hidden.abs().max()


def test_alone_a_prompt_token_reads_no_other(tiny: TinyPair) -> None:
    target = load_model(tiny.target, torch.float32)
    module = TRAINED["prompt_tokens"].new_module(target)
    inputs = torch.randint(0, 300, (2, 31))
    before = [prompted(module, target, inputs, alone)[1] for alone in (False, True)]
    with torch.no_grad():
        module.embedding.weight[0] += 1
    after = [prompted(module, target, inputs, alone)[1] for alone in (False, True)]
    changed = [(a - b).abs().amax((0, 1, 3)) > 1e-3 for a, b in zip(before, after, strict=True)]
    assert [rows.tolist() for rows in changed] == [[True, True, True], [True, False, False]]


@pytest.mark.parametrize("distilled", [True, False])
def test_the_loss_is_that_of_its_formula(tiny: TinyPair, distilled: bool) -> None:
    target = load_model(tiny.target, torch.float32)
    module = TRAINED["prompt_tokens"].new_module(target)
    inputs, text = torch.randint(0, 300, (2, 31)), torch.randint(0, 300, (2, 31))
    found = PromptTokensLoss(target, distilled)(module, inputs, text)
    states, logits = prompted(module, target, inputs)
    log_q, expected = logits.log_softmax(-1), torch.tensor(0.0)
    roots = logits.shape[1]
    for i in range(3):
        rows = torch.arange(roots) * 3 + 1 + i
        if distilled:
            log_p = states.log_probs[:, rows]
            each = (log_p.exp() * (log_p - log_q[:, :, i])).sum(-1)
        else:
            each = -log_q[:, :, i].gather(-1, text[:, rows].unsqueeze(-1)).squeeze(-1)
        expected = expected + 0.8**i * each.mean()
    assert torch.allclose(found, expected, rtol=1e-5)


def test_in_training_a_prompt_token_sees_what_it_sees_when_drafting(tiny: TinyPair, folder: Path) -> None:
    """The logits of training are those of the draft forward over a cache."""
    target = load_model(tiny.target, torch.float32)
    llm = engine(tiny, {**PROMPTED, "model": str(folder)})
    drafter = llm.engine.drafter
    module = TRAINED["prompt_tokens"].new_module(target)
    with torch.no_grad():
        module.embedding.weight.copy_(llm.engine.runner.model.embed_tokens.weight[300:])
    inputs = torch.randint(0, 300, (1, 20))
    _, logits = prompted(module, target, inputs)
    root = 2 * module.shape.num_drafts
    text = inputs[0, : root + 1].tolist()
    rows = drafter.runner.run([Segment([*text, *drafter.prompt_ids], 0, list(range(8)), 3)])
    assert torch.allclose(logits[0, 2], rows, atol=0.1)  # training is in bf16


@pytest.mark.parametrize("options", FEWER_BITS, ids=str)
def test_with_fewer_bits_the_tokens_are_those_of_the_same_bits_undrafted(
    tiny: TinyPair, speculative: dict[str, Any], options: dict[str, Any]
) -> None:
    tokens_of_fewer_bits_are_those_undrafted(tiny, speculative, **options)


def test_prompt_tokens_are_never_emitted(tiny: TinyPair, speculative: dict[str, Any]) -> None:
    llm = engine(tiny, speculative)
    assert llm.engine.runner.run([Segment([301], 0, [0])]).shape[1] == 300
    assert list(llm.engine.drafter.prompt_ids) == [300, 301, 302]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"model": None}, ConfigError, "'prompt_tokens' needs 'model'"),
        ({"draft_sample_method": "random"}, ConfigError, "draft_sample_method='random'"),
    ],
    ids=str,
)
def test_bad_options_name_themselves(
    tiny: TinyPair, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        engine(tiny, {**PROMPTED, **options})


def test_layouts_without_blocks_are_refused(tiny: TinyPair, speculative: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match="'prompt_tokens' reads the blocks"):
        LLM(str(tiny.target), kv_cache_config={"layout": "kivi"}, speculative_config=speculative)
