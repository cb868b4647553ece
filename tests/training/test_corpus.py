from __future__ import annotations

import importlib.metadata
import json
from dataclasses import dataclass, field
from email.message import Message
from pathlib import Path, PurePosixPath, PureWindowsPath

import numpy as np
import pytest
from tokenizers import Tokenizer

from minillm.training import corpus as corpus_module
from minillm.training.corpus import Document, Source, documents, is_permissive, sources
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
        ("CC-BY-NC-4.0 AND MIT", "License-Expression"),
        ("Apache-2.0 AND SSPL-1.0", "License-Expression"),
        ("BUSL-1.1 AND MIT", "License-Expression"),
        ("MIT AND (OSL-3.0 OR BSD-3-Clause)", "License-Expression"),
        ("MIT AND CC-BY-SA-4.0", "License"),
        ("MIT License; GNU General Public License v3", "License"),
        ("License :: OSI Approved :: GNU Affero General Public License v3", "Classifier"),
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


@pytest.mark.parametrize(
    "licence",
    ["MIT AND PSF-2.0", "(Apache-2.0 OR BSD-2-Clause) AND 0BSD", "BSD-2-Clause AND Apache-2.0 WITH LLVM-exception"],
)
def test_an_expression_of_permissive_licences_is_one(licence):
    assert is_permissive(licence)


def test_of_several_classifiers_each_must_be_permissive(monkeypatch):
    def package(name: str, *classifiers: str) -> Distribution:
        found = Distribution(name, "", "Name")
        message = Message()
        for classifier in classifiers:
            message["Classifier"] = f"License :: {classifier}"
        monkeypatch.setattr(Distribution, "metadata", property(lambda self: metadata[self.name]))
        metadata[name] = message
        return found

    metadata: dict[str, Message] = {}
    mit, affero = "OSI Approved :: MIT License", "OSI Approved :: GNU Affero General Public License v3"
    found = [package("bad", mit, affero), package("good", "OSI Approved", "DFSG approved", mit)]
    monkeypatch.setattr(corpus_module.metadata, "distributions", lambda: found)
    assert [(source.name, source.licence) for source in sources()[1:]] == [("good", "MIT License")]


def test_files_of_the_standard_library_have_the_same_names_on_windows(monkeypatch):
    """The split into training and held-out files depends on the name."""

    class WindowsPath(PureWindowsPath):
        def rglob(self, pattern):
            return [self / "json" / "tool.py"]

    monkeypatch.setattr(corpus_module, "Path", WindowsPath)
    monkeypatch.setattr(corpus_module.metadata, "distributions", list)
    assert [name for name, _ in sources()[0].files] == ["json/tool.py"]


def test_a_folder_that_pip_could_not_remove_is_no_package(monkeypatch, tmp_path):
    """Such as `~umpy-2.0.dist-info`: a name that begins with a tilde, and no metadata."""
    (tmp_path / "~umpy-2.0.dist-info").mkdir()
    monkeypatch.setattr(
        corpus_module.metadata, "distributions", lambda: importlib.metadata.Distribution.discover(path=[str(tmp_path)])
    )
    assert [source.name for source in sources()] == ["python"]


def test_a_folder_without_metadata_that_is_an_error_is_no_package(monkeypatch):
    """As `importlib_metadata` 10 answers, which takes over Python's own module wherever a package imports it."""

    class WithoutMetadata(importlib.metadata.Distribution):
        def read_text(self, filename):
            return None

        def locate_file(self, path):
            raise AssertionError("no file is looked for")

        @property
        def metadata(self):
            raise FileNotFoundError("No package metadata was found.")

    monkeypatch.setattr(
        corpus_module.metadata, "distributions", lambda: [WithoutMetadata(), Distribution("good", "MIT")]
    )
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
