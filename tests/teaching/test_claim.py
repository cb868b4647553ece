"""A sentence beside numbers: true, false, and false on this machine only."""

from __future__ import annotations

import pytest

from minillm.errors import LessonError
from minillm.teaching import claim


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
