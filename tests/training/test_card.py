from __future__ import annotations

import copy
import re

import pytest

from minillm.training.card import card, training_facts
from minillm.training.evaluate import Agreement, Evaluation
from minillm.training.gaps import Filled
from minillm.training.position_loss import Band
from minillm.training.pretrain import new_model
from minillm.training.recipes import distill_recipe, draft_recipe
from minillm.training.record import Hardware, LogRow, RunRecord
from minillm.training.target_evaluation import Repetition, TargetEvaluation, Written

from .conftest import config

HARDWARE = (
    Hardware("Some CPU", cores=8, threads=5, torch="2.9.9", python="3.11.1"),
    Hardware("Other CPU", cores=4, threads=3, torch="2.9.9", python="3.11.1", products="float32"),
    Hardware("Third CPU", cores=9, threads=9, torch="2.9.9", python="3.11.1", gpu="Some GPU"),
)
CORPUS = {
    "train": {"files": 701, "bytes": 9_876_543, "tokens": 3_210_987},
    "held_out": {"files": 17, "bytes": 54_321, "tokens": 19_283},
    "held_out_files": [],
    "near_duplicates": 437,
    "sources": [["python", "3.11.7", "PSF-2.0"], ["some-package", "4.5.6", "MIT"]],
}


def evaluation(shift: float) -> Evaluation:
    return Evaluation(
        target_bits_per_byte=1.234,
        draft_bits_per_byte=1.567 + shift,
        code=Agreement(11_111, 0.61 + shift, 0.62 + shift),
        greedy=Agreement(2_222, 0.71 + shift, 0.72 + shift),
        sampled=Agreement(3_333, 0.51 + shift, 0.52 + shift),
        greedy_repetition=0.37,
        num_drafts=4,
        greedy_tokens_per_forward=3.14 + shift,
    )


@pytest.fixture
def facts():
    run = RunRecord((LogRow(1, 512, 1.0, 5.0), LogRow(1777, 8_765_432, 4567.8, 2.5)), HARDWARE)
    runs = {"pretraining": (run, draft_recipe(76)), "distillation": (run, distill_recipe(20))}
    evaluations = {"distilled": evaluation(0.0), "undistilled": evaluation(-0.1)}
    return training_facts("minicoder-draft", "minicoder", new_model(config()), CORPUS, runs, evaluations)


def numbers(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?%?", text))


def section(text: str, title: str) -> str:
    return text.split(f"## {title}\n")[1].split("\n## ")[0]


def test_quality_states_the_measured_numbers_and_no_others(facts):
    measured = {"1.234", "1.567", "11,111", "2,222", "3,333", "3.14", "3.04", "37%"}
    measured |= {"61.0%", "51.0%", "62.0%", "52.0%", "71.0%", "72.0%", "41.0%", "42.0%"}
    modelled = {"2.00", "0.520", "5"}  # (1 − 0.52⁵) / (1 − 0.52)
    words = {"0", "1", "4", "8"}  # temperatures, γ, and the span of eight tokens
    assert numbers(section(card(facts), "How good it is")) == measured | modelled | words


def test_training_states_the_recorded_run(facts):
    text = section(card(facts), "Training")
    for fact in (
        "8,765,432",
        "1,777",
        "76.1",
        "2.73",
        "Some CPU (5 of 8 cores, bfloat16, PyTorch 2.9.9), then Other CPU (3 of 4 cores, float32, PyTorch 2.9.9), then",
        "then Some GPU (bfloat16, PyTorch 2.9.9)",
    ):
        assert fact in text
    assert "0.01 (Muon)" in text and "0.02 (Muon)" in text
    before, distillation = facts["runs"]["pretraining"], facts["runs"]["distillation"]
    assert f"| distillation | {before['tokens'] + distillation['tokens']:,} |" in text


def test_another_measurement_changes_the_card(facts):
    other = copy.deepcopy(facts)
    other["evaluation"]["distilled"]["code"]["top1"] = 0.987
    assert "98.7%" in card(other) and "98.7%" not in card(facts)


def test_corpus_lists_every_source_with_version_and_licence(facts):
    text = section(card(facts), "Corpus")
    assert "| python | 3.11.7 | PSF-2.0 |" in text and "| some-package | 4.5.6 | MIT |" in text
    assert {"701", "9,876,543", "3,210,987", "17", "54,321", "19,283"} <= numbers(text)


def test_target_card_does_not_speak_of_distillation_as_its_own(facts):
    del facts["runs"]["distillation"]
    assert "Distillation minimises" not in card(facts)


ALONE = TargetEvaluation(
    [Band(0, 500, 2.75, 4_500, 2.75), Band(3000, 4000, 2.25, 9_000, 2.625)],
    Filled(321, 0.4125, 0.2875),
    Repetition(128, 0.345, 0.043),
    [Written("some/file.py", "def f(x):\n", "    return x\n", "    pass ```\n")],
)


@pytest.fixture
def target_facts(facts):
    run = RunRecord((LogRow(0, 400, 0.5, 5.0), LogRow(9, 8_765_432, 4567.8, 2.5)), HARDWARE)
    runs = {"pretraining": (run, draft_recipe(76))}
    evaluations = {"distilled": evaluation(0.0), "undistilled": evaluation(-0.1)}
    return training_facts("minicoder", "minicoder-draft", new_model(config()), CORPUS, runs, evaluations, ALONE)


def test_a_targets_card_says_how_far_its_weights_are_extrapolated(target_facts, facts):
    text = section(card({**target_facts, "extrapolation": 1.375}), "Training")
    assert "1.375 times the way" in text
    assert "times the way" not in card(facts)


def test_a_targets_card_states_what_was_measured_of_it_alone(target_facts):
    text = section(card(target_facts), "Long contexts, gaps, repetition")
    measured = {
        "0",
        "500",
        "2.750",
        "4,500",
        "3,000",
        "4,000",
        "2.250",
        "2.625",
        "9,000",
        "321",
        "41.2%",
        "28.7%",
        "34.5%",
        "4.3%",
    }
    assert numbers(text) == measured | {"128", "8"}  # tokens of a continuation, and of a span


def test_a_targets_card_shows_its_texts_as_they_came(target_facts):
    text = section(card(target_facts), "What it writes")
    assert "some/file.py" in text and "```python\ndef f(x):\n    return x\n```" in text
    assert "````python\ndef f(x):\n    pass ```\n````" in text, "a fence longer than what it encloses"


def test_a_run_that_began_with_other_weights_says_so(target_facts, facts):
    assert "its first 400 tokens are those of an earlier version" in card(target_facts)
    assert "earlier version" not in card(facts)
