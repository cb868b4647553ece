"""Lessons on another model: every cell runs, failures are named, claims of the bundled model's figures are counted."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import pytest
from transformers import AutoConfig

from instructors.trial import other_model
from minillm.llm import LLM
from minillm.models import bundled
from minillm.sampling.params import SamplingParams
from minillm.teaching.course import choose
from minillm.teaching.workshop.l12_views import far_definition
from minillm.teaching.workshop.l14_moving import edits
from minillm.teaching.workshop.l16_replicas import documents, requests
from minillm.tokenizer import Tokenizer

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
    first = llm.engine.tokenizer.token_string(output.prompt_token_ids[0])
    assert first == (other_model.BOS if family in ("llama", "mistral") else "def"), "as the family's tokenizers do"


def test_lessons_that_compose_a_prompt_begin_no_text_in_its_middle(tmp_path) -> None:
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled.path("minicoder") / file, tmp_path)
    other_model.add_bos(tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    llm = SimpleNamespace(engine=SimpleNamespace(tokenizer=tokenizer, runner=SimpleNamespace(block_size=16)))
    inserted, _ = edits(llm, [tokenizer.encode("a = 1\nb = 2\nc = 3\n")])
    prompts = [far_definition(llm).token_ids, inserted.after, *requests(llm, documents(llm, 3, 200), 2)]
    bos = tokenizer.backend.token_to_id(other_model.BOS)
    assert all(bos not in prompt[1:] for prompt in prompts)
