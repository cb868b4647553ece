from __future__ import annotations

from types import SimpleNamespace

import pytest

from minillm import LLM
from minillm.errors import TrainingError
from minillm.training.gaps import BEFORE, LONGEST, SHORTEST, Gap, fill, line_gaps

FILE = "import os\n\n\ndef walk(root):\n    for name in os.listdir(root):\n        yield name, 'ümläut'\n\n\nLAST = 1\n"


def test_a_gap_is_the_rest_of_a_line_and_the_three_parts_are_the_file():
    gaps = line_gaps([FILE, "x\n"], 50)
    assert len(gaps) == 50 and len(set(gaps)) > 10
    for gap in gaps:
        assert gap.prefix + gap.rest + gap.suffix == FILE
        assert SHORTEST <= len(gap.rest) <= LONGEST and "\n" not in gap.rest
        assert gap.suffix.startswith("\n") and len(gap.prefix.splitlines()[-1].lstrip()) >= SHORTEST
    assert gaps == line_gaps([FILE, "x\n"], 50)


def test_a_line_ends_at_its_line_end_and_not_at_a_form_feed():
    file = "import os\n" + "\f".join(["left = 12345678", "right = 1234567"]) + "\n" + "# end\n"
    for gap in line_gaps([file], 50):
        assert gap.suffix == "\n# end\n"


def test_long_files_are_shown_in_part():
    [gap] = line_gaps(["# first\n" + "value = call(argument)\n" * 1000], 1)
    assert len(gap.prefix) <= BEFORE


def test_files_without_a_usable_line_are_told():
    with pytest.raises(TrainingError, match="no held-out file has a line of 8 characters"):
        line_gaps(["a = 1\nb = 2\n", ""], 3)


def test_only_the_exact_rest_counts_and_both_ways_are_asked():
    gaps = [Gap("a = ", "first  ", "\n"), Gap("b = ", "second", "\n"), Gap("c = ", "third", "\n")]
    answers = {"a = |\n": "first", "b = |\n": "second", "c = |\n": "thirds", "a = ": "no", "b = ": "second", "c = ": ""}

    def generate(prompts, params):
        assert params.temperature == 0 and params.stop_strings == ("\n",)
        return [SimpleNamespace(outputs=[SimpleNamespace(text=answers[prompt])]) for prompt in prompts]

    llm = SimpleNamespace(fim_prompt=lambda prefix, suffix: f"{prefix}|{suffix}", generate=generate)
    found = fill(llm, gaps)
    assert (found.gaps, found.with_suffix, found.without_suffix) == (3, 2 / 3, 1 / 3)


def test_a_real_engine_can_be_asked(tiny):
    found = fill(LLM(str(tiny.target), device="cpu", enforce_eager=True), line_gaps([FILE], 3))
    assert found.gaps == 3 and 0 <= found.with_suffix <= 1
