"""vLLM's answers to the script: asked for here, kept in `vllm_answers.json`.

    MINILLM_VLLM_PYTHON=/path/to/an/environment/bin/python python -m tests.parity.record

makes the file again, in a minute or two; the interpreter named is one that has vLLM (its CPU build will do).
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

from minillm.bench.vllm_peer import INTERPRETER
from minillm.models import bundled

SCRIPT = Path(__file__).with_name("script.py")
RECORD = Path(__file__).with_name("vllm_answers.json")
COMMAND = f"{INTERPRETER}=/path/to/an/environment/bin/python python -m tests.parity.record"
PATIENCE_S = 600


def model() -> str:
    """The folder of the checkpoint that both engines are given."""
    return str(bundled.path("minicoder"))


def weights() -> str:
    """Which weights those are: the SHA-256 of their file."""
    return hashlib.sha256(Path(model(), "model.safetensors").read_bytes()).hexdigest()


def ask_vllm(interpreter: str) -> dict[str, Any]:
    """What the script prints when it imports vLLM, run by `interpreter` on one thread."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    environment |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    environment.pop("PYTHONPATH", None)
    command = [interpreter, str(SCRIPT), "vllm", model()]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    if done.returncode:
        raise RuntimeError(f"vLLM under {interpreter} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout)


def save(answers: dict[str, Any]) -> None:
    """Write the record: a line for each case, so that a difference between two records reads well."""
    answers["about"] |= {"weights": weights(), "made by": COMMAND}
    sections = []
    for name, section in answers.items():
        text = json.dumps(section)
        if isinstance(section, dict):
            text = (
                "{\n"
                + ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in section.items())
                + "\n }"
            )
        sections.append(f"{json.dumps(name)}: {text}")
    RECORD.write_text("{\n " + ",\n ".join(sections) + "\n}\n")


def load() -> dict[str, Any]:
    """The answers of vLLM that were kept."""
    return json.loads(RECORD.read_text())


if __name__ == "__main__":
    save(ask_vllm(os.environ[INTERPRETER]))
