from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest
import torch

from minillm.errors import TrainingError
from minillm.training import continuations
from minillm.training.continuations import continue_rows, exported, new_writer, until_loop, write_continuations
from minillm.training.data import Passes
from minillm.training.export import export
from minillm.training.pretrain import dense_logits, new_model
from minillm.training.stage_runs import as_shipped

from .conftest import config


def model_with_opinions():
    """Random weights large enough that every layer and head matters to the logits."""
    model = new_model(config())
    for p in model.parameters():
        if p.ndim == 2:
            torch.nn.init.normal_(p, std=0.3)
    return as_shipped(model)


@contextmanager
def writer_of(model, corpus, length):
    with exported(model, corpus / "tokenizer.json") as checkpoint:
        yield new_writer(checkpoint, length)


def test_greedy_rows_are_the_argmax_of_a_forward_without_cache(corpus, monkeypatch):
    """Also where not all rows are written at once."""
    monkeypatch.setattr(continuations, "ROWS_AT_ONCE", 2)
    model = model_with_opinions()
    prompts = torch.randint(1, 300, (3, 9))
    with writer_of(model, corpus, 40) as writer:
        text = continue_rows(writer, prompts, 40, torch.zeros(3), seed=0)
    with torch.no_grad():
        expected = dense_logits(model, text[:, :-1].contiguous()).view(3, 39, -1).argmax(-1)
    assert torch.equal(text[:, :9], prompts)
    assert torch.equal(text[:, 9:], expected[:, 8:])


def test_samples_follow_the_softmax(corpus):
    """χ² of 4000 first tokens against the model's own distribution, rare tokens pooled; false alarm 1 in 10⁴."""
    from scipy import stats

    model = model_with_opinions()
    prompt = torch.randint(1, 300, (1, 5))
    with torch.no_grad():
        p = torch.softmax(dense_logits(model, prompt)[-1].double() / 0.7, -1).numpy()
    with writer_of(model, corpus, 6) as writer:
        text = continue_rows(writer, prompt.repeat(4000, 1), 6, torch.full((4000,), 0.7), seed=1)
    counts = np.bincount(text[:, 5].numpy(), minlength=300)
    common = p * 4000 >= 5
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(p[common], p[~common].sum()) * 4000
    assert stats.chisquare(observed, expected).pvalue > 1e-4


def test_a_loop_is_cut_soon_after_it_begins():
    fresh, loop = list(range(50)), list(range(100, 110))
    cut = until_loop(fresh + loop * 20)
    assert cut[:60] == fresh + loop
    # The first turn of the loop is news, and so are the spans that enter the second.
    assert len(cut) == 50 + 10 + 7 + 32
    assert until_loop(list(range(300))) == list(range(300))


def test_texts_of_a_model_with_the_same_norms_are_refused(corpus, tmp_path):
    """Such as a fine-tune with merged LoRA."""
    windows, checkpoint, model = Passes(corpus), tmp_path / "target", new_model(config())
    export(model, corpus / "tokenizer.json", checkpoint)
    write_continuations(checkpoint, windows, tmp_path / "texts", parts=1, rows=2, length=80)
    with torch.no_grad():
        model.layers[1].qkv_proj.weight += 0.1
    export(model, corpus / "tokenizer.json", checkpoint)
    with pytest.raises(TrainingError, match=r"texts was started with .*remove it to start again"):
        write_continuations(checkpoint, windows, tmp_path / "texts", parts=1, rows=2, length=80)


def test_parts_with_the_same_prompts_have_other_texts(corpus):
    with writer_of(model_with_opinions(), corpus, 80) as writer:
        prompts, temperatures = torch.full((2, 64), 7), torch.ones(2)
        texts = [continue_rows(writer, prompts, 80, temperatures, seed=number) for number in (0, 1, 0)]
    assert torch.equal(texts[0], texts[2])
    assert len({tuple(row) for part in texts[:2] for row in part.tolist()}) == 4


def test_interrupted_writing_goes_on_where_it_stopped(corpus, tmp_path, monkeypatch):
    windows, checkpoint = Passes(corpus), tmp_path / "target"
    export(new_model(config()), corpus / "tokenizer.json", checkpoint)
    write_continuations(checkpoint, windows, tmp_path / "whole", parts=3, rows=8, length=80)
    calls = []

    def counted(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return continue_rows(*args, **kwargs)

    monkeypatch.setattr(continuations, "continue_rows", counted)
    for _ in range(2):
        try:
            write_continuations(checkpoint, windows, tmp_path / "parts", parts=3, rows=8, length=80)
        except KeyboardInterrupt:
            assert not (tmp_path / "parts" / "continuations.npy").exists()
    assert len(calls) == 4, "two parts before the interrupt, the third again, none twice"
    name = "continuations.npy"
    assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    tokens = np.load(tmp_path / "whole" / name)
    texts = [part.tobytes() for part in np.split(tokens, np.flatnonzero(tokens == 0) + 1) if part.size > 40]
    assert len(texts) == len(set(texts)) > 4
