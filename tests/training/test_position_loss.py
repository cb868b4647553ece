from __future__ import annotations

import numpy as np
import pytest
import torch

from minillm.errors import TrainingError
from minillm.training.position_loss import loss_by_position
from minillm.training.pretrain import dense_logits, new_model

from .conftest import config


def files(*lengths: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(1, 300, length).astype(np.uint16) for length in lengths]


def test_bands_hold_the_loss_of_their_positions_in_long_enough_files():
    model, texts = new_model(config()), files(40, 33, 20)
    for layer in model.layers:
        torch.nn.init.normal_(layer.o_proj.weight)  # a new model ignores its context
    bands = loss_by_position(model, texts, edges=(0, 8, 32))
    assert [(band.first, band.last, band.tokens) for band in bands] == [(0, 8, 16), (8, 32, 48)]
    by_hand, short = [], []
    for text in texts[:2]:
        ids = torch.from_numpy(text[:33].astype(np.int64))
        log_p = dense_logits(model, ids[None, :-1]).float().log_softmax(-1)
        by_hand.append(-log_p[torch.arange(32), ids[1:]])
        log_p = torch.cat(
            [dense_logits(model, ids[None, at : at + 8]).float().log_softmax(-1) for at in (0, 8, 16, 24)]
        )
        short.append(-log_p[torch.arange(32), ids[1:]])
    by_hand, short = torch.stack(by_hand), torch.stack(short)
    assert bands[0].loss == pytest.approx(by_hand[:, :8].mean().item(), rel=1e-5)
    assert bands[1].loss == pytest.approx(by_hand[:, 8:].mean().item(), rel=1e-5)
    assert bands[0].short_loss == pytest.approx(bands[0].loss, rel=1e-5)
    assert bands[1].short_loss == pytest.approx(short[:, 8:].mean().item(), rel=1e-5)
    assert abs(bands[1].short_loss - bands[1].loss) > 1e-3, "the context is worth something"


def test_without_a_long_file_it_says_how_long_the_longest_is():
    with pytest.raises(TrainingError, match="more than 100 tokens, the longest has 40"):
        loss_by_position(new_model(config()), files(40, 12), edges=(0, 100))
