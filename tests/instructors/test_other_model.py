"""Lessons on another model: every cell runs, failures are named, claims of the bundled model's figures are counted."""

from __future__ import annotations

import json

import pytest
from transformers import AutoConfig

from instructors.trial import other_model
from minillm.llm import LLM
from minillm.sampling.params import SamplingParams
from minillm.teaching.course import choose

SOURCE = """\
# %% [markdown]
# # A lesson

# %%
import os
from minillm.teaching import claim

assert os.environ["MINILLM_MODEL"].endswith("target") and os.environ["MINILLM_DRAFT"].endswith("draft")
claim("This model is the bundled one.", False, of_model=True)

# %%
raise ValueError("no head of 384")

# %%
claim("Cells behind a failure run.", True)
"""


def test_failures_are_named_and_do_not_end_the_run(tmp_path) -> None:
    (tmp_path / "solutions").mkdir()
    (tmp_path / "solutions" / "90_sample.py").write_text(SOURCE)
    outcome = other_model.run(choose(tmp_path)[0], tmp_path / "target", tmp_path / "draft")
    assert outcome.failed == ((4, "ValueError: no head of 384"),)
    assert outcome.num_cells == 4 and outcome.differs == 1
    assert str(outcome).splitlines() == [
        "90_sample: 4 cells, 1 failed, 1 claims not so",
        "  cell 4: ValueError: no head of 384",
    ]


@pytest.mark.parametrize("family", other_model.FAMILIES)
def test_a_checkpoint_of_each_family_runs_with_heads_of_64(tmp_path, family: str) -> None:
    folder = other_model.make(family, tmp_path / family, layers=1)
    assert AutoConfig.from_pretrained(folder).model_type == family
    stored = json.loads((folder / "config.json").read_text())
    assert stored.get("head_dim", stored["hidden_size"] // stored["num_attention_heads"]) == 64
    llm = LLM(str(folder), enforce_eager=True, max_model_len=64)
    [output] = llm.generate("def f", SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 3
