"""The quality meter measures what it says: right tokens, right positions, through the real cache, nothing left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from minillm import cli
from minillm.bench import quality, quality_systems
from minillm.bench.quality import Texts, join, judge, logprobs, measure
from minillm.bench.quality_systems import CACHES, Builder, QualitySystem, systems
from minillm.cache.compressed_prompt import CompressedPromptKVCache
from minillm.cache.layouts import LAYOUTS
from minillm.cache.paged import PagedKVCache
from minillm.commands import bench
from minillm.models.held_out import evaluation_prompts
from minillm.quantization.schemes import SCHEMES
from minillm.tokenizer import Tokenizer
from tests.conftest import TinyPair


@pytest.fixture(scope="module")
def texts(tiny: TinyPair) -> Texts:
    """Short texts for a model with a context of 256."""
    tokenizer = Tokenizer.from_folder(tiny.target)
    encoded = [tokenizer.encode(prompt.prompt)[:70] for prompt in evaluation_prompts()[:9]]
    return join(encoded, 120, [0], tokenizer)


def of(name: str) -> QualitySystem:
    return next(system for system in systems() if system.name == name)


# --- texts ----------------------------------------------------------------------------------------------------------


def test_joined_texts_are_the_texts_and_only_their_own_tokens_count(tiny: TinyPair) -> None:
    tokenizer = Tokenizer.from_folder(tiny.target)
    encoded = [[5, 6, 7], [8], [9, 10, 11, 12, 13]]
    made = join(encoded, 8, [0], tokenizer)
    assert made.rows == [[5, 6, 7, 0, 8, 0], [9, 10, 11, 12, 13, 0]]
    assert made.scored == [[1, 2], [1, 2, 3, 4]]
    assert made.targets.tolist() == [6, 7, 10, 11, 12, 13]
    assert made.num_bytes == sum(len(tokenizer.token_bytes(token)) for token in (6, 7, 10, 11, 12, 13))


def test_a_text_that_goes_on_in_the_next_row_counts_there_but_for_what_opens_the_row(tiny: TinyPair) -> None:
    made = join([[5, 6, 7, 8, 9, 10]], 4, [], Tokenizer.from_folder(tiny.target))
    assert made.rows == [[5, 6, 7], [8, 9, 10]] and made.scored == [[1, 2], [1, 2]]


def test_rows_fill_the_context_and_never_exceed_it(texts: Texts) -> None:
    lengths = [len(row) for row in texts.rows]
    assert max(lengths) <= 120 and len(lengths) == -(-sum(lengths) // 120)


# --- the reference ---------------------------------------------------------------------------------------------------


def test_the_reference_is_transformers(tiny: TinyPair, texts: Texts) -> None:
    """Whole rows at once there, chunks through the paged cache here."""
    got = logprobs(Builder(str(tiny.target), len(texts.rows)).build(of("kv auto")).runner, texts)
    peer = AutoModelForCausalLM.from_pretrained(tiny.target).float().eval()
    expected = []
    for row, own in zip(texts.rows, texts.scored, strict=True):
        with torch.inference_mode():
            logits = peer(torch.tensor([row])).logits[0]
        expected.append(logits.log_softmax(-1)[[i - 1 for i in own]])
    torch.testing.assert_close(got, torch.cat(expected), rtol=1e-3, atol=1e-3)


def test_figures_of_known_distributions() -> None:
    """Two tokens of a vocabulary of two: KL, perplexity and bits by hand."""
    texts = Texts([[0, 1, 0]], [[1, 2]], num_bytes=4)
    exact = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log()
    other = torch.tensor([[0.25, 0.75], [0.4, 0.6]]).log()
    found = judge(exact, other, texts)
    first = 0.5 * torch.tensor(2.0).log() + 0.5 * torch.tensor(2 / 3).log()
    second = 0.9 * torch.tensor(0.9 / 0.4).log() + 0.1 * torch.tensor(0.1 / 0.6).log()
    assert found.mean_kl == pytest.approx(float(first + second) / 2, rel=1e-5)
    assert found.max_kl == pytest.approx(float(second), rel=1e-5)
    assert found.mean_kl_error == pytest.approx(float(second - first) / 2, rel=1e-5)
    assert found.perplexity == pytest.approx((0.75 * 0.4) ** -0.5, rel=1e-5)
    assert found.bits_per_byte == pytest.approx(-float(torch.tensor(0.75 * 0.4).log2()) / 4, rel=1e-5)
    assert found.top1 == 0.0
    same = judge(exact, exact, texts)
    assert (same.mean_kl, same.max_kl, same.top1) == (0.0, 0.0, 1.0)


# --- systems ---------------------------------------------------------------------------------------------------------


def test_every_layout_and_every_scheme_is_measured() -> None:
    found = systems()
    layouts = {
        quality_systems.find_layout(quality_systems._cache_config(s.options)) for s in found if s.kind == "cache"
    }
    assert layouts == {made for made in LAYOUTS.values() if not issubclass(made, CompressedPromptKVCache)}
    assert {s.method for s in found if s.kind == "weights"} == set(SCHEMES)
    assert len({s.name for s in found}) == len(found)


def test_what_has_no_name_is_measured_with_its_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality_systems, "CACHES", {"kv auto": {}})
    monkeypatch.setattr(quality_systems, "WEIGHTS", {})
    names = [system.name for system in systems()]
    layouts = {made for made in LAYOUTS.values() if not issubclass(made, CompressedPromptKVCache)}
    assert names[0] == "kv auto" and len(names) == len(layouts) + len(SCHEMES)
    assert "kv paged int8" in names and "weights awq" in names


def test_equal_bytes_are_compared_with_equal_bytes() -> None:
    builder = Builder("minicoder", 1)
    assert builder.build(of("kv int4 g16")).num_bytes == builder.build(of("kv kivi r84")).num_bytes


def test_bytes_are_of_float16_at_full_context() -> None:
    built = Builder("minicoder", 1).build(of("kv int8"))
    assert built.num_bytes == 2 * 8 * 2 * (64 + 2) and built.float16_bytes == 2 * 8 * 2 * 128
    assert isinstance(built.runner.cache, PagedKVCache) is False


@pytest.mark.parametrize(
    "name", [name for name in CACHES if name in ("kv contiguous", "kv int8", "kv int4", "kv kivi")]
)
def test_caches_are_read_back_and_lose_what_they_must(tiny: TinyPair, texts: Texts, name: str) -> None:
    """The exact ones nothing, the others something: a meter that never reads what was stored would see no loss."""
    builder = Builder(str(tiny.target), len(texts.rows))
    reference = logprobs(builder.build(of("kv auto")).runner, texts)
    row = measure(of(name), builder, texts, reference)
    assert row.error is None and row.quality is not None and row.ratio is not None
    if name == "kv contiguous":
        assert row.quality.mean_kl < 1e-6 and row.outputs_equal and row.ratio == 1
    else:
        assert 1e-5 < row.quality.mean_kl < 1 and row.ratio > 1


def test_a_system_that_a_model_cannot_have_says_so(tiny: TinyPair, texts: Texts) -> None:
    builder = Builder(str(tiny.target), len(texts.rows))
    odd = QualitySystem("kv odd", "cache", {"kv_cache_dtype": "int4", "kv_cache_config": {"group_size": 5}})
    row = measure(odd, builder, texts, torch.zeros(1))
    assert row.quality is None and "group_size=5" in (row.error or "")


def test_run_gives_a_table_and_json(
    tiny: TinyPair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = [
        of("kv auto"),
        of("kv int8"),
        of("weights int8"),
        QualitySystem("kv odd", "cache", {"kv_cache_dtype": "int3"}),
    ]
    monkeypatch.setattr(quality, "systems", lambda: few)
    monkeypatch.setattr(quality, "evaluation_prompts", lambda: evaluation_prompts()[:4])
    outcome: dict[str, Any] = quality.run(str(tiny.target))
    assert [row["system"] for row in outcome["rows"]] == ["kv auto", "kv int8", "weights int8", "kv odd"]
    assert outcome["schema"] == 1 and outcome["rows"][0]["quality"]["mean_kl"] == 0
    monkeypatch.setattr(bench, "find", lambda name: lambda: outcome)
    monkeypatch.setenv("COLUMNS", "160")
    assert cli.main(["bench", "quality", "--json", str(tmp_path / "out.json")]) == 0
    printed = capsys.readouterr().out
    assert "mean KL" in printed and "0.562" in printed and "int3" in printed
    assert '"mean_kl"' in (tmp_path / "out.json").read_text()
