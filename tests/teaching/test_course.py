"""The files of a lesson: what is no notebook is as good as missing."""

from __future__ import annotations

import nbformat
import pytest

from minillm.teaching.course import read_notebook


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"{", b"[]", b"3", b"null", b"{}", b'{"nbformat": 9}', b'{"nbformat": 4}', b'{"nbformat": "x"}'),
        *(b'{"nbformat": 4, "cells": 3}', b'{"nbformat": 3, "worksheets": [], "metadata": {}}'),
        *(b'{"nbformat": 4, "metadata": {}, "nbformat_minor": 5, "cells": [], "x": "\xe4"}', b"\xff\xfe{"),
    ],
)
def test_a_file_that_holds_no_notebook_is_none(tmp_path, data: bytes) -> None:
    (tmp_path / "x.ipynb").write_bytes(data)
    assert read_notebook(tmp_path / "x.ipynb") is None


def test_a_notebook_is_read_as_it_is(tmp_path) -> None:
    assert read_notebook(tmp_path / "x.ipynb") is None
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 + 1")])
    (tmp_path / "x.ipynb").write_text(nbformat.writes(notebook))
    assert read_notebook(tmp_path / "x.ipynb") == notebook
