"""Passes over the corpus: every window once, the same for the same arguments, gaps to fill in half of the files."""

from __future__ import annotations

import gc
import shutil
import subprocess
import sys
from itertools import product

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from minillm.errors import TrainingError
from minillm.fill_in_the_middle import FIM_MIDDLE, FIM_PREFIX, FIM_SUFFIX
from minillm.training import data
from minillm.training.data import Passes
from minillm.training.fim_documents import LATER, PRETRAINING, GapShares, pieces, training_document, with_gap
from minillm.training.near_duplicates import without_near_duplicates
from minillm.training.state_files import replacing
from minillm.training.train_tokenizer import END_OF_TEXT

from .conftest import source_file


def test_a_pass_shows_every_window_once_and_the_next_one_in_another_order(corpus):
    passes = Passes(corpus)
    passes.batch(0, 1, 64)
    first = np.load(corpus / "passes" / "0.npy")
    windows = (first.size - 1) // 64
    seen = [tuple(passes.batch(step, 1, 64)[0][0].tolist()) for step in range(windows)]
    expected = [tuple(first[i * 64 : (i + 1) * 64].tolist()) for i in range(windows)]
    assert sorted(seen) == sorted(expected) and seen != expected
    passes.batch(windows, 1, 64)
    assert (corpus / "passes" / "1.npy").exists()
    assert not np.array_equal(first[:500], np.load(corpus / "passes" / "1.npy")[:500])


def test_batches_depend_on_nothing_but_their_arguments(corpus):
    inputs, targets = Passes(corpus).batch(3, 4, 32)
    again = Passes(corpus)
    again.batch(9, 2, 64)
    assert np.array_equal(again.batch(3, 4, 32)[0], inputs)
    assert np.array_equal(inputs[:, 1:], targets[:, :-1])


def test_rows_longer_than_the_text_are_refused(corpus):
    with pytest.raises(TrainingError, match="rows of 9999999 tokens need a text of 10000000"):
        Passes(corpus).batch(0, 1, 9_999_999)


def test_a_gap_is_moved_to_the_end_and_nothing_is_lost():
    rng = np.random.default_rng(0)
    text = source_file(1)
    assert "".join(pieces(text, rng)) == text
    kinds = set()
    for _ in range(3000):
        prompt, gap = with_gap(text, rng)
        first, rest = prompt.removeprefix(FIM_PREFIX).split(FIM_SUFFIX)
        second, last = rest.split(FIM_MIDDLE)
        prefix, suffix, middle = first or last, second, gap.removesuffix(END_OF_TEXT)
        assert "" in (first, last) and prefix + middle + suffix == text
        kinds.add((bool(last), suffix[:1] == "\n" or suffix == "", "\n" in middle))
    assert kinds == set(product((True, False), repeat=3))


@pytest.mark.parametrize("shares", [PRETRAINING, LATER])
def test_as_many_files_have_gaps_and_as_many_gaps_end_with_a_line_as_the_shares_say(shares: GapShares):
    """Of 2,000 choices a share is off by more than 0.05 once in 10⁵."""
    rng = np.random.default_rng(0)
    text = source_file(1)
    whole = sum(training_document(text, rng, shares) == [text + END_OF_TEXT] for _ in range(2000))
    assert whole / 2000 == pytest.approx(1 - shares.files, abs=0.05)
    ends = 0
    for _ in range(2000):  # a gap between two random characters ends with a line in about one of thirty
        prompt, _ = with_gap(text, rng, shares.lines)
        suffix = prompt.split(FIM_SUFFIX)[1].split(FIM_MIDDLE)[0]
        ends += suffix[:1] in ("", "\n")
    assert ends / 2000 == pytest.approx(shares.lines + (1 - shares.lines) / 30, abs=0.05)


def test_other_shares_of_gaps_are_other_passes(corpus, tmp_path):
    for name in ("tokenizer.json", "train.jsonl.gz"):
        shutil.copy(corpus / name, tmp_path)
    early, _ = Passes(tmp_path).batch(0, 2, 32)
    later, _ = Passes(tmp_path, LATER).batch(0, 2, 32)
    again, _ = Passes(tmp_path).batch(0, 2, 32)
    assert not torch.equal(early, later) and torch.equal(early, again)


def test_markers_are_one_token_each(corpus):
    tokenizer = Tokenizer.from_file(str(corpus / "tokenizer.json"))
    ids = tokenizer.encode(f"{FIM_PREFIX}a{FIM_SUFFIX}b{FIM_MIDDLE}c<|endoftext|>").ids
    assert [i for i in ids if i < 4] == [1, 2, 3, 0]


def test_no_token_reaches_across_the_start_of_a_gap(corpus, tmp_path, monkeypatch):
    """Otherwise no training document would have what a cursor inside a word gives."""
    for name in ("tokenizer.json", "train.jsonl.gz"):
        shutil.copy(corpus / name, tmp_path)
    monkeypatch.setattr(data, "training_document", lambda text, rng, shares: ["(se", "lf, "])
    inputs, _ = Passes(tmp_path).batch(0, 1, 64)
    tokenizer = Tokenizer.from_file(str(corpus / "tokenizer.json"))
    before, after, joined = (tokenizer.encode(text).ids for text in ("(se", "lf, ", "(self, "))
    assert inputs[0, : len(before + after)].tolist() == before + after != joined


def test_near_duplicates_go_and_what_is_only_alike_in_parts_stays():
    files = [source_file(i) for i in range(4)]
    copy = files[0].replace("class", "klass") + "# copied from elsewhere\n"
    lines = files[1].split("\n")
    unlike = "\n".join(f"{line}  # {i}" for i, line in enumerate(lines))
    texts = [*files, copy, unlike]
    assert without_near_duplicates(texts, [False] * 6) == [0, 1, 2, 3, 5]


def test_hardly_any_pair_near_the_stricter_threshold_is_missed():
    """Of 40 pairs that share three fifths of their lines; an index that is asked for half of them misses six."""
    lines = [[f"line {i} of file {number}" for i in range(50)] for number in range(40)]
    texts = ["\n".join(part) for file in lines for part in (file[:40], file[10:])]
    assert without_near_duplicates(texts, [False, True] * 40) == list(range(0, 80, 2))


def test_a_held_out_file_goes_if_a_training_file_is_like_it():
    files = [source_file(i) for i in range(3)]
    half = "".join(files[0].partition("def ")[:1]) + "\n".join(
        files[0].split("\n")[: len(files[0].split("\n")) * 2 // 3]
    )
    assert without_near_duplicates([half, *files], [True, False, False, False]) == [1, 2, 3]
    assert without_near_duplicates([half, *files], [False] * 4) == [0, 1, 2, 3]


def test_the_next_pass_is_encoded_ahead_in_another_process(corpus, tmp_path, monkeypatch):
    """It is the pass that this process would have written, and it does not write it again."""
    for name in ("tokenizer.json", "train.jsonl.gz"):
        shutil.copy(corpus / name, tmp_path)
    expected, passes = Passes(corpus), Passes(tmp_path)
    passes.batch(0, 1, 64)
    windows = (np.load(tmp_path / "passes" / "0.npy").size - 1) // 64
    assert not passes._ahead, "at the beginning of a pass there is time"
    passes.batch(windows // 3 + 1, 1, 64)
    assert list(passes._ahead) == [1]
    monkeypatch.setattr(Passes, "write_pass", lambda self, number: pytest.fail(f"pass {number} was written twice"))
    found, _ = passes.batch(windows, 1, 64)
    monkeypatch.undo()
    assert torch.equal(found, expected.batch(windows, 1, 64)[0]) and not passes._ahead


def test_a_process_that_encodes_ahead_ends_with_the_passes(corpus, tmp_path):
    """A run that is over needs no further pass."""
    for name in ("tokenizer.json", "train.jsonl.gz"):
        shutil.copy(corpus / name, tmp_path)
    passes = Passes(tmp_path)
    passes._encode_ahead(1)
    process = passes._ahead[1]
    del passes
    gc.collect()
    assert process.wait(timeout=60) != 0
    assert not list(tmp_path.glob("passes/*"))


def test_a_process_that_is_terminated_while_it_writes_leaves_no_part_of_a_file(corpus, tmp_path):
    for name in ("tokenizer.json", "train.jsonl.gz"):
        shutil.copy(corpus / name, tmp_path)
    code = f"""
import signal
from minillm.training import data
data.encode_all = lambda *given: [0]
data.np.save = lambda out, array: (out.write(b"part"), out.flush(), signal.raise_signal(signal.SIGTERM))
data.write_pass({str(tmp_path)!r}, "0.5", "0.5", "1")
"""
    assert subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL).returncode != 0
    assert list((tmp_path / "passes").iterdir()) == []


def test_two_writers_of_one_file_do_not_mix(tmp_path):
    file = tmp_path / "0.npy"
    with replacing(file) as one, replacing(file) as other:
        one.write_text("the whole of one")
        other.write_text("other")
    assert file.read_text() == "the whole of one" and list(tmp_path.iterdir()) == [file]


def test_a_pass_whose_process_failed_is_written_here(corpus, tmp_path, monkeypatch):
    for name in ("tokenizer.json", "train.jsonl.gz"):
        shutil.copy(corpus / name, tmp_path)
    passes = Passes(tmp_path)
    passes.batch(0, 1, 64)
    windows = (np.load(tmp_path / "passes" / "0.npy").size - 1) // 64
    monkeypatch.setattr(data.sys, "executable", shutil.which("false"))
    passes.batch(windows - 1, 1, 64)
    assert torch.equal(passes.batch(windows, 1, 64)[0], Passes(corpus).batch(windows, 1, 64)[0])
