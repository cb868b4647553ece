"""The parts of all ranks are the whole model: every number is held, none twice where it would count twice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from minillm.cache.paged import PagedKVCache
from minillm.errors import ConfigError, UnsupportedError
from minillm.models.config import ModelConfig
from minillm.models.decoder import Decoder
from minillm.models.loading import load_model, save_llama
from minillm.models.tensor_names import stored_parts
from minillm.parallel.local import on_ranks
from minillm.parallel.split import check_split, config_of_rank, piece_of
from minillm.runtime.runner import ModelRunner
from tests.parallel.split_steps import CPU, STEPS, split_runner

CONFIG = ModelConfig(
    vocab_size=273,  # not divisible: the last rank has fewer tokens
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=8,
    num_kv_heads=4,
    head_dim=4,
    max_position_embeddings=64,
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
)


def saved(config: ModelConfig, folder: Path) -> Path:
    """A random checkpoint, its biases and norms too."""
    torch.manual_seed(1)
    model = Decoder(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    save_llama(model, folder, torch.float32)
    return folder


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("size", [2, 4])
def test_split_model_gives_the_logits_of_the_whole(size: int, kv_heads: int, tied: bool, tmp_path: Path) -> None:
    folder = saved(replace(CONFIG, num_kv_heads=kv_heads, tie_word_embeddings=tied), tmp_path)
    whole = load_model(folder, torch.float64)
    runner = ModelRunner(whole, PagedKVCache(whole.config, 16, 4, torch.float64, CPU), 4)
    expected = [runner.run(step) for step in STEPS]

    def run(group):
        split = split_runner(folder, group)
        return [split.run(step) for step in STEPS]

    for rank in on_ranks(size, run):
        for logits, right in zip(rank, expected, strict=True):
            assert torch.allclose(logits, right, rtol=0, atol=1e-11)


def test_the_error_of_the_rank_that_failed_is_raised() -> None:
    def run(group):
        if group.rank == 1:
            raise ValueError("rank 1 is wrong")
        return group.all_reduce(torch.ones(1))

    with pytest.raises(ValueError, match="rank 1 is wrong"):
        on_ranks(2, run)


def test_a_layer_needs_exactly_two_all_reduces(tmp_path: Path) -> None:
    folder = saved(CONFIG, tmp_path)

    def run(group):
        runner = split_runner(folder, group)
        counts = []
        for step in STEPS:
            group.traffic.clear()
            runner.run(step)
            counts.append((group.traffic.num_all_reduces, group.traffic.num_all_gathers))
        return counts

    embedding = 1
    for counts in on_ranks(2, run):
        assert counts == [(2 * CONFIG.num_layers + embedding, 1)] * len(STEPS)


def test_ranks_that_are_threads_time_what_they_exchange() -> None:
    def run(group):
        x = torch.full((2, 3), float(group.rank))
        group.all_reduce(x)
        reduced = group.traffic.seconds
        gathered = group.all_gather(x)
        return reduced, group.traffic, gathered.shape

    for reduced, traffic, shape in on_ranks(2, run):
        assert 0 < reduced < traffic.seconds
        assert (traffic.num_all_reduces, traffic.num_all_gathers, traffic.num_bytes) == (1, 1, 2 * 24)
        assert shape == (2, 6)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_ranks_hold_every_number_of_the_checkpoint(size: int) -> None:
    """Once; KV heads as often as there are ranks for each."""
    for name, part in stored_parts(CONFIG).items():
        counts = torch.zeros(part.shape)
        for rank in range(size):
            piece = piece_of(name, CONFIG, rank, size)
            if piece.on_rank_0_only and rank:
                continue
            held = counts if piece.columns is None else counts[:, piece.columns.start : piece.columns.stop]
            rows = piece.rows or range(part.shape[0])
            held[rows.start : rows.stop] += 1
        copies = max(1, size // CONFIG.num_kv_heads) if "k_proj" in name or "v_proj" in name else 1
        wanted = size if "norm" in name else copies
        assert torch.equal(counts, torch.full(part.shape, float(wanted))), name


def test_a_rank_holds_its_share_of_memory(tmp_path: Path) -> None:
    folder = saved(CONFIG, tmp_path)
    whole = load_model(folder, torch.float64).num_parameters
    norms = (2 * CONFIG.num_layers + 1) * CONFIG.hidden_size
    biases = 2 * CONFIG.num_layers * CONFIG.hidden_size  # of o_proj and down_proj: zeros on other ranks
    padding = 2 * CONFIG.hidden_size * (2 * config_of_rank(CONFIG, 2).vocab_size - CONFIG.vocab_size)
    held = on_ranks(2, lambda group: split_runner(folder, group).model.num_parameters)
    assert sum(held) == whole + norms + biases + padding


@pytest.mark.parametrize(
    ("change", "size", "reason"),
    [
        ({"num_heads": 6, "num_kv_heads": 2}, 4, "6 query heads; possible are 1, 2, 6"),
        ({"num_heads": 12, "num_kv_heads": 4}, 3, "4 KV heads can neither be split nor copied evenly"),
        ({"intermediate_size": 50}, 4, "50 inner channels; possible are 1, 2"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(change: dict[str, int], size: int, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"tensor_parallel_size={size} does not divide the model: .*{reason}"):
        check_split(replace(CONFIG, **change), size)


def test_family_with_its_own_decoder_is_refused() -> None:
    class Own(Decoder):
        pass

    with pytest.raises(UnsupportedError, match="Own computes its layers in its own way"):
        check_split(replace(CONFIG, decoder=Own), 2)
