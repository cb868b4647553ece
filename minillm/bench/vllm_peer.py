"""vLLM as a peer, in its own process and Python environment, because its requirements conflict with ours.

`VllmPeer` is the client. The server is this same file, run by an interpreter that has vLLM, so the file must not import
minillm at module level. They exchange JSON, one object per line. The client first sends the requests, then an empty
line for each run; the server answers each with the tokens.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

INTERPRETER = "MINILLM_VLLM_PYTHON"
"""Environment variable with the path of a Python interpreter that has vLLM."""
NO_VLLM = f"{INTERPRETER} does not name an interpreter with vLLM"
SCRIPT = Path(__file__)
"""Run with `runpy` instead of as a script, because the files in this folder would shadow packages (`kernels`)."""


class VllmPeer:
    """A vLLM process that runs the same requests repeatedly."""

    def __init__(self, interpreter: str, threads: int, **spec: Any) -> None:
        """`spec`: `model` (a folder), `dtype`, `prompts` (token ids), `lengths` (new tokens of each), `max_num_seqs`.

        Raises `ConfigError` if the interpreter cannot run it.
        """
        environment = {**cpu_environment(threads), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        command = [interpreter, "-c", f"import runpy; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"]
        self.process = start_vllm(command, environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            self.details: dict[str, Any] = self._ask(json.dumps(spec))
            """The versions of vLLM and of its PyTorch, and the number of threads."""
        except BaseException:  # also an interrupt: while it loads, it does not see that its input ends
            self.process.kill()
            self.close()
            raise

    def run(self) -> list[list[int]]:
        """The new tokens of every request."""
        return self._ask("")["tokens"]

    @property
    def peak_memory(self) -> int | None:
        """Peak resident bytes of the process; None without `/proc`."""
        from minillm.bench.processes import peak_memory_of_process  # not at module level, as in `_no_answer`

        return peak_memory_of_process(self.process.pid)

    def close(self) -> None:
        """End the process."""
        with suppress(BrokenPipeError):  # it has ended by itself
            self.process.stdin.close()
        self.process.wait()

    def _ask(self, line: str) -> dict[str, Any]:
        try:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            self.close()
            raise _no_answer(self.process.args[0])
        return json.loads(answer)


def cpu_environment(threads: int) -> dict[str, str]:
    """The environment of a vLLM process that runs on the CPU with so many threads."""
    found = {**os.environ, "OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""}
    found |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    found.pop("PYTHONPATH", None)
    return found


def start_vllm(command: list[str], environment: dict[str, str], **pipes: Any) -> subprocess.Popen[Any]:
    """Start `command`, whose first word is an interpreter with vLLM. Raises `ConfigError` if there is none."""
    try:
        return subprocess.Popen(command, env=environment, **pipes)
    except OSError as problem:
        from minillm.errors import ConfigError  # not at module level: the server has no minillm

        raise ConfigError(
            f"{command[0]} cannot be run ({problem.strerror}); {INTERPRETER} must name an interpreter that can import "
            "vllm"
        ) from problem


def _no_answer(interpreter: str) -> Exception:
    from minillm.errors import ConfigError  # not at module level: the server has no minillm

    return ConfigError(
        f"vLLM under {interpreter} ended without an answer, and its error, if it gave one, is above; {INTERPRETER} "
        "must name an interpreter that can import vllm"
    )


def serve() -> None:
    """The server: read the requests, then run them for each empty line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other output must not mix with the answers
    spec = json.loads(sys.stdin.readline())
    import torch
    import vllm

    llm = vllm.LLM(
        spec["model"],
        dtype=spec["dtype"],
        skip_tokenizer_init=True,
        max_num_seqs=spec["max_num_seqs"],
        max_model_len=1024,
        enable_prefix_caching=False,
    )
    prompts = [{"prompt_token_ids": ids} for ids in spec["prompts"]]
    params = [
        vllm.SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)
        for length in spec["lengths"]
    ]
    versions = {"vllm": vllm.__version__, "vllm_torch": torch.__version__}
    print(json.dumps({**versions, "threads": torch.get_num_threads()}), file=answers, flush=True)
    for _ in sys.stdin:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        print(json.dumps({"tokens": tokens}), file=answers, flush=True)


if __name__ == "__main__":
    serve()
