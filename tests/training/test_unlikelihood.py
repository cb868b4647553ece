from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from minillm.models.decoder import Decoder
from minillm.training import unlikelihood
from minillm.training.continuations import PROMPT_LENGTH
from minillm.training.data import Passes
from minillm.training.precision import forward_precision
from minillm.training.pretrain import Loss, Recipe, Trainer, dense_logits, new_model
from minillm.training.stage_runs import as_shipped
from minillm.training.unlikelihood import NO_LOSS, SHORT, SPAN, OwnText, chosen, unlearned, unlikelihood_loss

from .conftest import config


class Counting:
    """Rows of a text without repetition: 0, 1, 2, …"""

    def batch(self, step: int, rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        whole = (step + torch.arange(rows * (length + 1)).view(rows, length + 1)) % 299
        return whole[:, :-1].contiguous(), whole[:, 1:].contiguous()


def all_chosen(texts: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(texts, dtype=torch.bool)


def circle(period: int) -> tuple[torch.Tensor, int]:
    """A row that goes round in a circle, and the index at which the circle begins."""
    fresh = torch.arange(PROMPT_LENGTH + 20)
    return torch.cat((fresh, torch.arange(100, 100 + period).repeat(6))).unsqueeze(0), len(fresh)


@pytest.mark.parametrize("period", [5, 10, 13, SHORT])
def test_a_short_circle_is_unlearned_from_its_second_round_on(period: int) -> None:
    texts, begin = circle(period)
    found = unlearned(texts, all_chosen(texts))[0]
    first = begin + period + SPAN - 1  # a span must have come before
    assert (found[:first] == NO_LOSS).all()
    assert torch.equal(found[first:], -1 - texts[0, first:])


@pytest.mark.parametrize("period", [SHORT + 1, 60])
def test_a_long_circle_is_unlearned_from_its_third_round_on(period: int) -> None:
    texts, begin = circle(period)
    found = unlearned(texts, all_chosen(texts))[0]
    first = begin + 2 * period
    assert (found[:first] == NO_LOSS).all()
    assert torch.equal(found[first:], -1 - texts[0, first:])


def test_what_is_repeated_after_something_else_is_left_alone() -> None:
    """Code calls the same function again and again."""
    call = torch.arange(200, 212)
    other = torch.arange(300, 300 + SHORT)
    between = [torch.cat((call, other + i * SHORT)) for i in range(4)]
    texts = torch.cat([torch.arange(PROMPT_LENGTH), *between])[None]
    assert (unlearned(texts, all_chosen(texts)) == NO_LOSS).all()


def test_a_token_that_was_no_choice_the_first_time_is_left_alone() -> None:
    fresh = torch.arange(PROMPT_LENGTH)
    texts = torch.cat((fresh, torch.arange(200, 210).repeat(4))).unsqueeze(0)
    chosen = torch.zeros_like(texts, dtype=torch.bool)
    chosen[0, PROMPT_LENGTH + 8] = True  # in the loop's first turn, where the spans that end there come first
    found = unlearned(texts, chosen)[0]
    places = [PROMPT_LENGTH + turn * 10 + 8 for turn in (1, 2, 3)]
    assert torch.nonzero(found != NO_LOSS).flatten().tolist() == places
    assert found[places].tolist() == [-1 - 208] * 3


def test_what_the_model_was_sure_of_is_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, texts = new_model(config()), torch.randint(1, 299, (3, 20))
    log_p = F.log_softmax(dense_logits(model, texts).detach(), -1).view(3, 20, -1)
    p = log_p.exp()[:, :-1].gather(2, texts[:, 1:, None]).squeeze(2)
    between = p.flatten().sort().values[28:30].mean().item()  # half are less likely
    monkeypatch.setattr(unlikelihood, "SURE", between)
    found = chosen(model, texts, rows=2)
    assert found[:, 0].all()
    assert torch.equal(found[:, 1:], p < between)


def test_repetition_inside_the_prompt_is_left_alone() -> None:
    texts = torch.arange(4).repeat(PROMPT_LENGTH // 4 + 3).unsqueeze(0)
    found = unlearned(texts, all_chosen(texts))[0]
    assert (found[:PROMPT_LENGTH] == NO_LOSS).all()
    assert (found[PROMPT_LENGTH:] < 0).all()
    assert (found[PROMPT_LENGTH:] != NO_LOSS).all()


def test_half_of_a_batch_is_the_models_own_text(corpus: Path) -> None:
    torch.manual_seed(0)
    model = as_shipped(new_model(config()))
    length = PROMPT_LENGTH + 40
    batches = OwnText(Counting(), model, corpus / "tokenizer.json", (length,))
    inputs, targets = batches.batch(5, 4, length)
    plain_inputs, plain_targets = Counting().batch(5, 4, length)
    assert torch.equal(inputs[:2], plain_inputs[:2])
    assert torch.equal(targets[:2], plain_targets[:2])
    with torch.no_grad():
        greedy = dense_logits(model, inputs[2:]).argmax(-1).view(2, length)
    assert torch.equal(greedy[:, PROMPT_LENGTH - 1 : -1], inputs[2:, PROMPT_LENGTH:])
    assert (targets[2:] < 0).all()
    others = batches.batch(6, 4, length)[0]
    assert not torch.equal(others[2:], inputs[2:])  # other rows of the same writing


def test_long_rows_are_all_real_code_and_leave_no_text_of_the_model_unused(corpus: Path) -> None:
    """Of three steps the first and the last have the model's own text: each takes the next rows of a writing."""
    short, long = PROMPT_LENGTH + 4, PROMPT_LENGTH + 9
    lengths = (short, long, short)
    batches = OwnText(Counting(), new_model(config()), corpus / "tokenizer.json", lengths)
    taken = []
    for step in range(15):
        length = lengths[step % 3]
        inputs, targets = batches.batch(step, 4, length)
        if length == long:
            plain = Counting().batch(step, 4, long)
            assert torch.equal(inputs, plain[0]) and torch.equal(targets, plain[1])
        else:
            taken.append(inputs[2:])
    written = [batches._texts(number, 2 * unlikelihood.STEPS_PER_WRITING, short + 1)[0] for number in (0, 1)]
    assert torch.equal(torch.cat(taken), torch.cat(written)[: 2 * len(taken), :-1])


@pytest.mark.parametrize("stop", [3, 4, 17])
def test_an_interrupted_run_goes_on_to_the_bit(stop: int, corpus: Path, tmp_path: Path) -> None:
    """Every second step has own text, and eight such steps share a writing. The run stops in the first writing and in
    the second."""
    lengths = (96, 128)
    recipe = Recipe(tokens=20 * 384, tokens_per_step=384, lengths=lengths, warmup_steps=1, adam_lr=0.1)

    def trainer(folder: str, loss: Loss) -> Trainer:
        model = new_model(config())
        return Trainer(
            model,
            OwnText(Passes(corpus), model, corpus / "tokenizer.json", recipe.lengths, tmp_path / folder / "writings"),
            recipe,
            tmp_path / folder,
            loss,
        )

    calls = itertools.count()

    def interrupted(model: Decoder, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if next(calls) == stop:
            raise KeyboardInterrupt
        return unlikelihood_loss(model, inputs, targets)

    whole = trainer("whole", unlikelihood_loss)
    whole.run()
    with pytest.raises(KeyboardInterrupt):
        trainer("parts", interrupted).run()
    resumed = trainer("parts", unlikelihood_loss)
    assert resumed.step == stop
    resumed.run()
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_only_the_last_writings_stay_on_disk(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unlikelihood, "WRITINGS_KEPT", 2)
    batches = OwnText(Counting(), new_model(config()), corpus / "tokenizer.json", (PROMPT_LENGTH + 2,), tmp_path)
    for step in range(0, 5 * unlikelihood.STEPS_PER_WRITING, unlikelihood.STEPS_PER_WRITING):
        batches.batch(step, 2, PROMPT_LENGTH + 2)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["3.npy", "4.npy"]


def test_the_loss_is_the_formula_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the unlearned tokens is likelier than `ENOUGH` here, the other is not."""
    monkeypatch.setattr(unlikelihood, "ENOUGH", 0.0033)
    torch.manual_seed(0)
    model = new_model(config())
    inputs, targets = Counting().batch(0, 2, 24)
    targets[0, 3], targets[1, 7], targets[1, 8] = -1 - 5, -1, NO_LOSS
    with forward_precision("cpu"):
        log_p = F.log_softmax(dense_logits(model, inputs).float(), -1).view(2, 24, -1)
    losses, unlearned_tokens = [], []
    for row in range(2):
        for i, target in enumerate(targets[row].tolist()):
            if target == NO_LOSS:
                losses.append(0.0)
            elif target < 0:
                p = log_p[row, i, -1 - target].exp().item()
                unlearned_tokens.append(p > unlikelihood.ENOUGH)
                losses.append(-unlikelihood.WEIGHT * math.log(1 - p) if p > unlikelihood.ENOUGH else 0.0)
            else:
                losses.append(-log_p[row, i, target].item())
    assert sorted(unlearned_tokens) == [False, True]
    expected = sum(losses) / len(losses)
    assert unlikelihood_loss(model, inputs, targets).item() == pytest.approx(expected, rel=1e-4)
