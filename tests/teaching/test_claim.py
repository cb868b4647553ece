"""A sentence beside numbers: true, false, and false on this machine only."""

from __future__ import annotations

import pytest

from minillm.errors import LessonError
from minillm.teaching import claim, quoted
from minillm.teaching.lint import refuse_measured_claims
from minillm.teaching.notebook import read_source


def test_true_sentence_is_printed(capsys):
    claim("Two is more than one.", 2 > 1)
    assert capsys.readouterr().out == "✓ Two is more than one.\n"


def test_false_sentence_about_counts_is_an_error_everywhere():
    with pytest.raises(LessonError, match="One is more than two"):
        claim("One is more than two.", False)


def test_false_sentence_about_times_is_told_to_a_learner(capsys):
    claim("It is twice as fast.", False, measured=True)
    assert capsys.readouterr().out == "Not so on this machine: It is twice as fast.\n"


def test_false_sentence_about_times_is_never_recorded(monkeypatch):
    monkeypatch.setenv("MINILLM_RECORDING", "1")
    with pytest.raises(LessonError, match="twice as fast"):
        claim("It is twice as fast.", False, measured=True)


def test_figure_from_elsewhere_is_printed_with_its_source(capsys):
    quoted("An H100 reads 3.35 TB/s.", "NVIDIA H100 data sheet")
    assert capsys.readouterr().out == "An H100 reads 3.35 TB/s. (quoted: NVIDIA H100 data sheet)\n"


@pytest.mark.parametrize("given", [("", "a paper"), ("Twice as fast.", " ")])
def test_quotation_without_words_or_source_is_refused(given):
    with pytest.raises(LessonError, match="needs both"):
        quoted(*given)


@pytest.mark.parametrize(
    "code",
    [
        'claim("fast", a > b, measured=True)',
        'claim("fast", a > b, True)',
        'for x in y:\n    if x:\n        claim("fast", x, measured=everything)',
        '%time f()\nclaim("fast", a > b, measured=True)',
    ],
)
def test_measured_claim_in_a_cell_that_is_compared_is_refused(code):
    with pytest.raises(LessonError, match=r'90_sample, cell 4, line \d: .*add tags=\["nbval-ignore-output"\]'):
        refuse_measured_claims(code, "90_sample, cell 4")


@pytest.mark.parametrize(
    "code",
    [
        'claim("fewer", a < b)',
        'claim("fewer", a < b, measured=False)',
        'def tell():\n    claim("fast", a > b, measured=True)',
        'print("claim", measured=True)',
        "this is not Python",
    ],
)
def test_other_cells_are_left_alone(code):
    refuse_measured_claims(code, "90_sample, cell 4")


def test_build_refuses_a_measured_claim_unless_its_cell_is_tagged(tmp_path):
    source = tmp_path / "92_claims.py"
    head = "# %% [markdown]\n# # 92. Claims\n\n"
    claimed = 'claim("It is fast.", True, measured=True)\n'
    source.write_text(f'{head}# %% tags=["nbval-ignore-output"]\n{claimed}')
    read_source(source)
    source.write_text(f"{head}# %%\n{claimed}")
    with pytest.raises(LessonError, match="92_claims, cell 3, line 1"):
        read_source(source)


def test_false_sentence_about_the_weights_is_told_to_who_brings_another_model(capsys, monkeypatch):
    claim("INT4 changes more texts.", False, of_model=True)
    assert capsys.readouterr().out == "Not so with this model: INT4 changes more texts.\n"
    monkeypatch.setenv("MINILLM_RECORDING", "1")
    with pytest.raises(LessonError, match="changes more texts"):
        claim("INT4 changes more texts.", False, of_model=True)
