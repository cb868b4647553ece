"""Training drafters for a frozen target: what learns, what stays, what is written, and how honest the numbers are."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from minillm.errors import CheckpointError, TrainingError
from minillm.models.decoder import Decoder
from minillm.speculative.draft_heads import DraftHeads, HeadsShape
from minillm.speculative.prompt_tokens import PromptTokens, PromptTokensShape
from minillm.training.continuations import continue_rows, exported, new_writer
from minillm.training.data import Passes, read_documents, retokenise
from minillm.training.drafter_evaluation import Acceptance, acceptance
from minillm.training.heads_loss import HeadsLoss, greedy_survival, sampled_reach
from minillm.training.optimizers import matrices
from minillm.training.pretrain import Recipe, Trainer, new_model
from minillm.training.stage_runs import as_shipped
from minillm.training.target_states import Targets, num_roots, target_states, targets_of_roots
from minillm.training.train_tokenizer import train_tokenizer
from minillm.training.trained_drafters import TRAINED

from .conftest import config

RECIPE = Recipe(tokens=10 * 128, tokens_per_step=128, lengths=(32,), warmup_steps=2)


@pytest.fixture
def target() -> Decoder:
    """A random target, deeper than any draft. In a new one no block would change anything, so that copies of its last
    blocks would be the target."""
    model = new_model(config(layers=4))
    for layer in model.layers:
        for linear in (layer.o_proj, layer.mlp.down_proj):
            nn.init.normal_(linear.weight, std=0.5)
    return model


def test_matrices_of_a_decoder_are_those_of_its_layers_in_the_order_of_saved_states():
    for tied in (True, False):
        model = Decoder(replace(config(), tie_word_embeddings=tied))
        expected = [p for layer in model.layers for p in layer.parameters() if p.ndim == 2]
        assert list(map(id, matrices(model))) == list(map(id, expected))


def test_embeddings_are_left_to_adam_and_linear_layers_are_not(target, corpus, tmp_path):
    assert matrices(PromptTokens(PromptTokensShape(32))) == []
    heads = DraftHeads(HeadsShape(32))
    assert len(matrices(heads)) == sum(isinstance(m, nn.Linear) for m in heads.modules())
    prompts = TRAINED["prompt_tokens"].new_module(target)
    trainer = Trainer(prompts, Passes(corpus), RECIPE, tmp_path, TRAINED["prompt_tokens"].loss(target))
    assert [type(o).__name__ for o in trainer.optimizers] == ["AdamW"]


@pytest.mark.parametrize("method", TRAINED)
def test_the_loss_falls_and_the_target_stays_as_it_is(method, target, corpus, tmp_path):
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    module, loss, text = TRAINED[method].new_module(target), TRAINED[method].loss(target), Passes(corpus)

    def loss_on_the_same_text() -> float:
        torch.manual_seed(0)
        with torch.no_grad():
            return sum(float(loss(module, *text.batch(step, 16, 32))) for step in range(4))

    untrained = loss_on_the_same_text()
    Trainer(module, text, RECIPE, tmp_path, loss).run()
    assert loss_on_the_same_text() < 0.99 * untrained
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.state_dict().items())


@pytest.mark.parametrize("method", TRAINED)
def test_an_interrupted_run_goes_on_to_the_bit(method, target, corpus, tmp_path):
    drafter, text = TRAINED[method], Passes(corpus)
    whole = Trainer(
        drafter.new_module(target), text, replace(RECIPE, tokens=6 * 128), tmp_path / "whole", drafter.loss(target)
    )
    whole.run()
    real, calls = drafter.loss(target), []

    def interrupted(module, inputs, targets):
        calls.append(1)
        if len(calls) > 3:
            raise KeyboardInterrupt
        return real(module, inputs, targets)

    with pytest.raises(KeyboardInterrupt):
        Trainer(
            drafter.new_module(target), text, replace(RECIPE, tokens=6 * 128), tmp_path / "parts", interrupted
        ).run()
    resumed = Trainer(
        drafter.new_module(target, 1), text, replace(RECIPE, tokens=6 * 128), tmp_path / "parts", drafter.loss(target)
    )
    assert resumed.step == 3
    resumed.run()
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_drafts_are_compared_with_the_rows_after_their_root(target):
    inputs, following = torch.randint(0, 300, (2, 23)), torch.randint(0, 300, (2, 23))
    states = target_states(target, inputs)
    compared = targets_of_roots(states, following, 5)
    assert compared.given.shape == (2, num_roots(23, 5), 5) == (2, 4, 5)
    for row, root, i in ((0, 0, 0), (1, 2, 3), (0, 3, 4)):
        at = root * 5 + i
        assert compared.given[row, root, i] == following[row, at]
        assert compared.text[row, root, i] == following[row, at + 1]
        assert torch.equal(compared.log_probs[row, root, i], states.log_probs[row, at + 1])


def small_case(text):
    """Two positions over three tokens: p = (.5, .3, .2), (.6, .3, .1); q = (.25, .6, .15), (.1, .8, .1)."""
    p = torch.tensor([[[[0.5, 0.3, 0.2], [0.6, 0.3, 0.1]]]])
    q = torch.tensor([[[[0.25, 0.6, 0.15], [0.1, 0.8, 0.1]]]])
    return Targets(torch.zeros(1, 1, 2, dtype=torch.int64), torch.tensor([[text]]), p.log()), q.log()


def test_greedy_decoding_reaches_the_second_draft_only_if_the_first_was_right():
    compared, log_q = small_case([0, 0])
    assert greedy_survival(compared, log_q)[0].tolist() == [[[1, 0]]], "p and q have another argmax at first"
    compared, log_q = small_case([0, 0])
    agreeing = compared.log_probs.clone()
    assert greedy_survival(compared, agreeing)[0].tolist() == [[[1, 1]]]
    compared, _ = small_case([2, 0])
    assert greedy_survival(compared, agreeing)[0].tolist() == [[[1, 0]]], "greedy decoding would not emit this text"


def test_the_reach_of_sampled_text_is_the_rate_of_acceptance():
    """Averaged over what the target emits, P(the first draft was accepted | its token) is Σ min(p, q)."""
    total = sum(p * sampled_reach(*small_case([token, 0]))[0, 0, 1].item() for token, p in enumerate((0.5, 0.3, 0.2)))
    assert total == pytest.approx(0.25 + 0.3 + 0.15)


def test_a_drafter_that_is_the_target_is_always_accepted(target, corpus):
    def exact(module, model, inputs, targets):
        compared = targets_of_roots(target_states(model, inputs), targets, 3)
        return compared, compared.log_probs

    with exported(as_shipped(target), corpus / "tokenizer.json") as checkpoint:
        writer = new_writer(checkpoint, 41)
    tokens = continue_rows(writer, torch.randint(0, 300, (4, 2)), 41, torch.zeros(4), seed=0)
    found = acceptance(exact, nn.Linear(1, 1), target, [(tokens[:, :-1], tokens[:, 1:])], skip=7)
    assert found.sampled == pytest.approx([1, 1, 1], abs=1e-5) and found.greedy == [1, 1, 1]
    assert found.roots == 4 * (num_roots(40, 3) - 3)
    assert Acceptance.tokens_per_round([0.5, 0.5]) == 1.75


def test_a_position_that_no_text_reaches_has_no_acceptance_and_is_no_nan(target):
    """Greedy decoding would not emit this text, so the second draft is never judged."""

    def exact(module, model, inputs, targets):
        compared = targets_of_roots(target_states(model, inputs), targets, 3)
        other = (compared.log_probs.argmax(-1) + 1) % 300
        return compared._replace(text=other), compared.log_probs

    tokens = torch.randint(0, 300, (2, 14))
    assert acceptance(exact, nn.Linear(1, 1), target, [(tokens[:, :-1], tokens[:, 1:])]).greedy == [1, 0, 0]


def test_confidences_do_not_change_what_is_drafted(target, corpus):
    """Their gradient stops before the network; that of the drafts reaches everything else."""
    heads = TRAINED["heads"].new_module(target)
    for parameter in heads.parameters():  # nothing is zero, so every gradient is
        nn.init.normal_(parameter, std=0.1)
    loss, batch = HeadsLoss(target), Passes(corpus).batch(0, 2, 32)
    found = []
    for scale in (1.0, 100.0):
        heads.zero_grad()
        with torch.no_grad():
            heads.confidence.weight.mul_(scale)
        loss(heads, *batch).backward()
        found.append({name: p.grad.clone() for name, p in heads.named_parameters()})
    for name, gradient in found[0].items():
        assert gradient.abs().sum() > 0, name
        assert name.startswith("confidence") or torch.equal(gradient, found[1][name]), name


def test_a_corpus_in_other_tokens_has_the_same_text(corpus, tmp_path):
    tokenizer = train_tokenizer(["def f(x): return x\n"] * 9, 262)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    retokenise(corpus, tmp_path / "tokenizer.json", tmp_path / "other")
    retokenise(corpus, tmp_path / "missing.json", tmp_path / "other")  # done already
    text, summary = tmp_path / "other", json.loads((tmp_path / "other" / "corpus.json").read_text())
    train = [tokenizer.encode(document.text).ids for document in read_documents(text / "train.jsonl.gz")]
    assert summary["train"]["tokens"] == sum(map(len, train))
    assert summary["held_out"]["tokens"] == np.load(text / "held_out.npy").size
    assert summary["train"]["bytes"] == json.loads((corpus / "corpus.json").read_text())["train"]["bytes"]
    inputs, _ = Passes(text).batch(0, 2, 64)
    assert inputs.max() < 262 and "def " in tokenizer.decode(inputs.flatten().tolist())


def test_a_tokenizer_without_end_of_text_is_refused(corpus, tmp_path):
    from tokenizers import Tokenizer, models

    Tokenizer(models.BPE()).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TrainingError, match=r"no token <\|endoftext\|> with id 0"):
        retokenise(corpus, tmp_path / "tokenizer.json", tmp_path / "other")


def test_an_unknown_target_is_refused_before_anything_is_made(corpus, tmp_path):
    from minillm.training.run import train

    (tmp_path / "corpus").symlink_to(corpus)
    with pytest.raises(CheckpointError, match="no model 'nobody'"):
        train(folder=tmp_path, stages=["heads"], target="nobody", export_to=tmp_path / "weights")
