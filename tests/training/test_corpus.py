from __future__ import annotations

import json
from dataclasses import dataclass, field
from email.message import Message
from pathlib import Path, PurePosixPath

import numpy as np
import pytest
from tokenizers import Tokenizer

from minillm.training import corpus as corpus_module
from minillm.training.corpus import Document, Source, documents, sources
from minillm.training.data import Passes, read_documents

from .conftest import source_file


@dataclass
class Distribution:
    """What `importlib.metadata` would say of an installed package."""

    name: str
    licence: str
    field_name: str = "License-Expression"
    version: str = "1.0"
    files: list[PurePosixPath] = field(default_factory=lambda: [PurePosixPath("a.py"), PurePosixPath("tests/b.py")])

    @property
    def metadata(self) -> Message:
        message = Message()
        message[self.field_name] = self.licence
        return message

    def locate_file(self, path: PurePosixPath) -> Path:
        return Path("/nowhere") / path


@pytest.mark.parametrize(
    ("licence", "field_name"),
    [
        ("GPL-3.0-or-later", "License-Expression"),
        ("MIT OR GPL-2.0", "License-Expression"),
        ("MPL-2.0 AND MIT", "License-Expression"),
        ("License :: OSI Approved :: GNU Lesser General Public License v3 (LGPLv3)", "Classifier"),
        ("License :: OSI Approved :: GNU General Public License (GPL)", "Classifier"),
        ("License :: Other/Proprietary License", "Classifier"),
        ("all rights reserved", "License"),
    ],
)
def test_package_without_a_permissive_licence_is_refused(monkeypatch, licence, field_name):
    found = [Distribution("bad", licence, field_name), Distribution("good", "MIT")]
    monkeypatch.setattr(corpus_module.metadata, "distributions", lambda: found)
    assert [source.name for source in sources()] == ["python", "good"]


def test_tests_of_a_package_are_left_out(monkeypatch):
    monkeypatch.setattr(corpus_module.metadata, "distributions", lambda: [Distribution("good", "MIT")])
    assert [name for name, _ in sources()[1].files] == ["a.py"]


def test_copies_generated_files_and_tables_are_left_out(tmp_path):
    texts = {
        "a.py": source_file(1),
        "copy.py": source_file(1).replace("    ", "  "),
        "generated.py": "# automatically generated\n" + source_file(2),
        "table.py": "x = [\n" + "    1234567, 7654321,\n" * 100 + "]\n",
        "short.py": "pass\n",
        "b.py": source_file(3),
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    source = Source("pkg", "1", "MIT", tuple((name, tmp_path / name) for name in sorted(texts)))
    assert [document.name for document in documents([source])] == ["pkg/a.py", "pkg/b.py"]


def test_split_depends_on_the_name_alone():
    names = [f"pkg/module{i}.py" for i in range(5000)]
    held_out = [Document(name, "one text").held_out for name in names]
    assert held_out == [Document(name, "another").held_out for name in names]
    assert 20 <= sum(held_out) <= 90


def test_held_out_files_are_not_in_the_training_tokens(corpus):
    tokenizer = Tokenizer.from_file(str(corpus / "tokenizer.json"))
    summary = json.loads((corpus / "corpus.json").read_text())
    assert summary["held_out"]["files"] == len(summary["held_out_files"]) > 0
    assert summary["train"]["files"] + summary["held_out"]["files"] + summary["near_duplicates"] == 200
    Passes(corpus).batch(0, 1, 16)
    trained_on = tokenizer.decode(np.load(corpus / "passes" / "0.npy").tolist(), skip_special_tokens=False)
    for name in summary["held_out_files"]:
        text = source_file(int(name.removeprefix("made-up/module").removesuffix(".py")))
        assert text not in trained_on
    whole = [d for d in read_documents(corpus / "train.jsonl.gz") if d.text in trained_on]
    assert len(whole) > 50, "the comparison itself must be able to find a file"


def test_long_tables_and_what_is_no_python_are_left_out(tmp_path):
    entries = [f"    'name{i}': ('word', {i % 7}),\n" for i in range(200)]
    texts = {
        "mapping.py": "TABLE = {\n" + "".join(entries) + "}\n",
        "code_with_a_table.py": source_file(4) * 4 + "TABLE = {\n" + "".join(entries[:100]) + "}\n",
        "python2.py": source_file(5) + "print 'no longer'\n",
        "markers.py": source_file(6) + "GAP = '<|fim_middle|>'\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    source = Source("pkg", "1", "MIT", tuple((name, tmp_path / name) for name in texts))
    assert [document.name for document in documents([source])] == ["pkg/code_with_a_table.py"]
