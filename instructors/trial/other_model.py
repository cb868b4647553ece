"""Run solved lessons on small random checkpoints of other families: which cells need the bundled model?

    python -m instructors.trial.other_model qwen3 --lessons 01 02
    python -m instructors.trial.other_model qwen2 mistral --folder /tmp/other

`MINILLM_MODEL` and `MINILLM_DRAFT` name two checkpoints that are made here: random weights in the family's layout,
heads 64 wide, the bundled tokenizer. In the families whose tokenizers begin every text with a token, it does so, too.
Every cell runs, also after one that failed. A cell fails here if it would stop a learner who brings a model of this
family. What only differs ("Not so with this model") is counted and is no failure.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from nbclient import NotebookClient
from nbformat import NotebookNode
from tokenizers.processors import TemplateProcessing

from minillm.models import bundled
from minillm.teaching.course import Lesson, choose
from minillm.teaching.notebook import read_source
from minillm.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
CELL_SECONDS = 300
FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 64}),
    "smollm3": ("SmolLM3", {}),
}
"""Families and what their configurations need beyond `SHAPE`."""
SHAPE: dict[str, object] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "initializer_range": 0.08,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}
ADD_BOS = ("llama", "mistral")
"""Families whose tokenizers begin a text with `BOS`: the post-processor in `tokenizer.json` does it."""
BOS = "<|begin_of_text|>"
LAYERS = {"target": 4, "draft": 1}


@dataclass(frozen=True)
class Outcome:
    """What one lesson did: `failed`: (cell number from 1, error); `differs`: claims of the bundled model."""

    lesson: str
    num_cells: int
    failed: tuple[tuple[int, str], ...]
    differs: int

    def __str__(self) -> str:
        head = f"{self.lesson}: {self.num_cells} cells, {len(self.failed)} failed, {self.differs} claims not so"
        return "\n".join([head, *(f"  cell {number}: {error}" for number, error in self.failed)])


def make(family: str, folder: Path, layers: int) -> Path:
    """Write a random checkpoint of `family` with its kind of tokenizer into `folder`, and return it."""
    import torch
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled.path("minicoder") / file, folder)
    if family in ADD_BOS:
        add_bos(folder)
    name, changes = FAMILIES[family]
    vocab_size = Tokenizer.from_folder(folder).vocab_size
    options = {**SHAPE, "vocab_size": vocab_size, "num_hidden_layers": layers, **changes}
    config = getattr(transformers, f"{name}Config")(**options)
    torch.manual_seed(layers)
    getattr(transformers, f"{name}ForCausalLM")._from_config(config).save_pretrained(folder)
    return folder


def add_bos(folder: Path) -> None:
    """Give the tokenizer in `folder` the token `BOS`, with which it begins every text."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([BOS])
    special = [(BOS, tokenizer.token_to_id(BOS))]
    tokenizer.post_processor = TemplateProcessing(f"{BOS} $A", special_tokens=special)
    tokenizer.save(str(folder / "tokenizer.json"))
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text(encoding="utf-8")) | {"bos_token": BOS, "add_bos_token": True}
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def run(lesson: Lesson, target: Path, draft: Path) -> Outcome:
    """Run every cell of the solved lesson on the two checkpoints."""
    notebook = read_source(lesson.source)
    with tempfile.TemporaryDirectory() as work:
        client = NotebookClient(
            notebook,
            timeout=CELL_SECONDS,
            kernel_name="python3",
            allow_errors=True,
            store_widget_state=False,
            resources={"metadata": {"path": work}},
        )
        client.execute(env=environment(target, draft))
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    failed = [
        (number, error)
        for number, cell in enumerate(notebook.cells, 1)
        if cell.cell_type == "code"
        for error in errors(cell)
    ]
    differs = sum(text.count("Not so with this model") for cell in cells for text in printed(cell))
    return Outcome(lesson.name, len(cells), tuple(failed), differs)


def environment(target: Path, draft: Path) -> dict[str, str]:
    """This process's environment with the two checkpoints, strict checks, and nothing recorded."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    chosen = {"MINILLM_MODEL": str(target), "MINILLM_DRAFT": str(draft), "MINILLM_STRICT": "1"}
    return {**os.environ, "PYTHONPATH": path, **chosen}


def errors(cell: NotebookNode) -> Iterator[str]:
    """The errors among the outputs of a cell, as `Name: message`."""
    for output in cell.get("outputs", []):
        if output.output_type == "error":
            yield f"{output.ename}: {output.evalue.strip()}"


def printed(cell: NotebookNode) -> Iterator[str]:
    """What a cell printed."""
    for output in cell.get("outputs", []):
        if output.output_type == "stream" and output.name == "stdout":
            yield output.text


def main(arguments: list[str] | None = None) -> int:
    """Run the lessons; 1 if a cell failed."""
    parser = argparse.ArgumentParser(prog="python -m instructors.trial.other_model", description=__doc__)
    parser.add_argument("families", nargs="+", choices=FAMILIES, metavar="FAMILY", help=", ".join(FAMILIES))
    parser.add_argument("--lessons", nargs="+", metavar="NUMBER", help="which lessons (default: all)")
    parser.add_argument("--folder", type=Path, help="keep the checkpoints here (default: a temporary folder)")
    args = parser.parse_args(arguments)
    failed = False
    with tempfile.TemporaryDirectory() as temporary:
        for family in args.families:
            place = (args.folder or Path(temporary)) / family
            target, draft = (make(family, place / which, layers) for which, layers in LAYERS.items())
            for lesson in choose(ROOT, args.lessons):
                outcome = run(lesson, target, draft)
                print(f"{family} {outcome}", flush=True)
                failed |= bool(outcome.failed)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
