"""Lessons 1 to 3: answers that passed once are caught, and the cause that is named is the right one or none."""

from __future__ import annotations

import inspect
import math
import re
import textwrap

import pytest
import torch

from minillm.teaching.check_function import check_function
from minillm.teaching.exercise import Exercise
from minillm.teaching.exercises import l01_decoding, l02_kv_cache, l03_roofline
from minillm.teaching.registry import find
from minillm.teaching.source import edited

every_exercise = pytest.mark.parametrize(
    "one",
    [one for module in (l01_decoding, l02_kv_cache, l03_roofline) for one in module.EXERCISES],
    ids=lambda one: one.name,
)


LEARNERS = {  # answers that passed once, or were told a wrong cause
    "l01.causal_attention": {
        ("-torch.inf", "-100.0"): "a number such as -100",
        ("-torch.inf", "-1000.0"): "a number such as -100",
        ("-torch.inf", "-10000.0"): "a number such as -100",
        ("head_dim**0.5", "head_dim**0.25"): None,
        ("/ head_dim**0.5", "/ 0.5"): None,
    },
    "l01.sample_next": {
        ("0 < top_k", "1 < top_k"): "ignores top_k = 1",
        ("topk(top_k).values[-1]", "topk(max(1, top_k - (top_k > 2))).values[-1]"): "never returns token",
        ("before >= top_p", "before > top_p"): "> instead of >=",
    },
    "l01.generate_naive": {
        ("int(forward(ids)[-1].argmax())", "forward(ids)[-1].argmax()"): "entries of type Tensor, where int is wanted",
        ("ids[-1] == eos_id", "eos_id in ids"): "because the prompt holds the end-of-text token",
        ("range(max_tokens)", "range(max_tokens if eos_id not in prompt_ids else 0)"): "calls the model 0 times",
        ("ids.append(int(", "forward(ids); ids.append(int("): "your tokens are right, but the model is called 2 times",
        ("return ids[", "yield from ids["): "`new tokens` is of type generator instead of list",
    },
    "l02.next_capacity": {
        ("needed <= capacity:", "needed == capacity:"): "shrinks a buffer",
    },
    "l02.best_r": {
        (" / pad_cost", ""): "ignores pad_cost",
        (" / pad_cost", " * pad_cost"): "multiplies by pad_cost",
        ("return min(max(r, 1.0), float(num_tokens))", "return float(round(min(max(r, 1.0), float(num_tokens))))"): (
            "rounds to a whole number"
        ),
    },
    "l03.arithmetic_intensity": {
        ("operations / (", "operations // ("): "this factor, or is it rounded down, as by // and int?",
        (
            "return operations / (numbers * bytes_per_value)",
            "return round(operations / (numbers * bytes_per_value), 2)",
        ): "this factor, or is it rounded?",
    },
    "l03.mbu": {("return ", "return 0 * "): "must be above 0 here: is something rounded down?"},
    "l03.requests_that_fit": {
        ("max(0, left", "max(1, left"): None,
    },
    "l03.mean_pool_heads": {
        (".mean(dim=1)", ".amax(dim=1)"): "takes the largest number of a group",
    },
}


@pytest.mark.parametrize(
    ("name", "edit", "cause"), [(name, edit, cause) for name, each in LEARNERS.items() for edit, cause in each.items()]
)
def test_a_mistake_that_passed_once_is_caught_and_named_or_not_named_wrongly(
    name: str, edit: tuple[str, str], cause: str | None
):
    report = check_function(name, edited(find(name).reference, edit))
    assert not report.passed
    assert cause in str(report) if cause else "it looks as if" not in str(report)


@every_exercise
def test_four_hints_in_plain_text_and_the_last_one_is_a_solution(one: Exercise):
    assert len(one.hints) == 4
    assert not any(re.search(r"`|\$|\*\w[\w ]*\*(?!\w)", hint) for hint in one.hints[:3])
    own: dict[str, object] = {}
    signature = re.sub(r" -> .*", "", str(inspect.signature(one.reference)))
    solution = f"def {one.function_name}{signature}:\n" + textwrap.indent(one.hints[3], "    ")
    exec("from __future__ import annotations\n" + solution, {"torch": torch, "math": math}, own)
    assert check_function(one, own[one.function_name]).passed


def test_the_cause_of_an_error_is_about_the_error_and_not_about_the_answers_of_other_cases():
    exercise = find("l10.accept_rule")

    def gathers_rows(p: torch.Tensor, q: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        p_x, q_x = p.gather(-1, x[..., None]).squeeze(-1), q.gather(0, x[..., None]).squeeze(-1)
        return torch.where(q_x > 0, (p_x / q_x).clamp(max=1.0), math.nan)

    assert "index 1 is out of range for dimension 0" in str(check_function(exercise, gathers_rows))

    def raises(p: torch.Tensor, q: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if p.shape == (1, 3):
            raise ValueError("nothing that a rule knows")
        return torch.zeros(x.shape)

    result = check_function(exercise, raises)
    assert not result.passed and "likely" not in str(result), str(result)
