"""What lesson 3 counts and times: a model's linear layers, its attention, whole steps, and models with other KV heads.

It times the code that the engine runs: `Linear`, `PagedKVCache.attend`, `ModelRunner.run`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from minillm.batch import Segment
from minillm.bench.timing import medians, time_in_turn
from minillm.cache.paged import PagedKVCache
from minillm.llm import LLM
from minillm.models.config import ModelConfig
from minillm.models.decoder import Decoder
from minillm.models.held_out import held_out_prompts
from minillm.models.hub import resolve
from minillm.models.loading import load_model, stored_tensors
from minillm.models.quantized_checkpoint import copy_beside_weights
from minillm.models.tensor_names import stored_parts
from minillm.ops.linear import Linear
from minillm.runtime.runner import ModelRunner
from minillm.sampling.params import SamplingParams
from minillm.teaching.free_memory import give_back_freed_memory

BLOCK_SIZE = 16
COLD_BYTES = 128e6
"""Weights are timed as several copies with at least this total size, so that they come from memory, not a cache."""
Conversion = Callable[[Tensor, int, int], Tensor]
Run = Callable[[], object]

# ------------------------------------------------------------------------------------------------------------ counted


def kv_bytes(config: ModelConfig, num_tokens: int, batch: int = 1, bytes_per_value: int = 4) -> int:
    """Bytes of the keys and values of `batch` texts of `num_tokens` tokens (lesson 2)."""
    return batch * num_tokens * 2 * config.num_layers * config.num_kv_heads * config.head_dim * bytes_per_value


def weight_bytes(model: Decoder) -> int:
    """Bytes of weights that one fp32 step reads: all layers and the unembedding, but not the embedding's few rows."""
    return 4 * (sum(p.numel() for p in model.layers.parameters()) + model.lm_head.weight.numel())


def weights_per_row(model: Decoder) -> int:
    """The number of weights, over all layers, that one row is multiplied with."""
    return sum(p.numel() for layer in model.layers for p in layer.parameters() if p.ndim == 2)


def operations(model: Decoder, rows: int, pairs: int, logits: int) -> int:
    """Operations of `rows` through the layers, `pairs` of a query and a key in attention, and `logits` rows."""
    config = model.config
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * pairs
    return 2 * weights_per_row(model) * rows + attention + 2 * config.vocab_size * config.hidden_size * logits


# -------------------------------------------------------------------------------------------------------------- timed


def time_linears(model: Decoder, rows_tried: Sequence[int]) -> dict[int, float]:
    """Seconds for one pass through all linear layers, for each number of rows."""
    took = _time_copies(model, rows_tried)
    give_back_freed_memory()  # the copies were hundreds of megabytes
    return took


def _time_copies(model: Decoder, rows_tried: Sequence[int]) -> dict[int, float]:
    shapes = linear_shapes(model)
    num_copies = 1 + int(COLD_BYTES // (4 * weights_per_row(model)))
    layers = [_random_linear(*shape) for _ in range(num_copies) for shape in shapes]
    inputs = {(rows, fan_in): torch.randn(rows, fan_in) for rows in rows_tried for _, fan_in in shapes}
    runs = {rows: lambda rows=rows: [part(inputs[rows, part.in_features]) for part in layers] for rows in rows_tried}
    return {rows: seconds / num_copies for rows, seconds in medians(time_in_turn(runs)).items()}


def linear_shapes(model: Decoder) -> list[tuple[int, int]]:
    """(out, in) of every linear layer."""
    return [(part.out_features, part.in_features) for part in model.layers.modules() if isinstance(part, Linear)]


def _random_linear(fan_out: int, fan_in: int) -> Linear:
    """A linear layer with its initial weights: values do not matter for the time."""
    part = Linear(fan_in, fan_out, bias=False)
    return part.requires_grad_(False)


def decoding(model: Decoder, batch: int, context: int) -> tuple[ModelRunner, list[Segment]]:
    """The engine's runner with a cache of random numbers, and `batch` decode requests of `context` tokens each."""
    blocks = -(-context // BLOCK_SIZE)
    cache = PagedKVCache(model.config, batch * blocks, BLOCK_SIZE, torch.float32, torch.device("cpu"))
    cache.keys.normal_()
    cache.values.normal_()
    tables = [list(range(r * blocks, (r + 1) * blocks)) for r in range(batch)]
    return ModelRunner(model, cache, BLOCK_SIZE), [Segment([5], context - 1, table) for table in tables]


def attention_only(model: Decoder, batch: int, context: int) -> Run:
    """A function that runs only the attention of all layers for one decode step."""
    runner, segments = decoding(model, batch, context)
    step, shape = runner.batch(segments), model.config
    q = torch.randn(batch, shape.num_heads, shape.head_dim)
    new = torch.randn(batch, shape.num_kv_heads, shape.head_dim)
    return lambda: [runner.cache.attend(layer, q, new, new, step) for layer in range(shape.num_layers)]


def decode_step(model: Decoder, batch: int, context: int) -> Run:
    """A function that runs one whole decode step in eager mode."""
    runner, segments = decoding(model, batch, context)
    return lambda: runner.run(segments)


def prefill(model: Decoder, tokens: int) -> Run:
    """A function that runs the prefill of a whole prompt in eager mode."""
    runner, [segment] = decoding(model, 1, tokens)
    return lambda: runner.run([Segment([5] * tokens, 0, segment.block_table)])


@dataclass(frozen=True)
class CompiledSteps:
    """Steps that are one compiled function each."""

    decode: Run
    prefill: Run
    weight_bytes: int
    """Bytes of weights that a step reads: 16-bit floats of a checkpoint stay in 16 bits; the step computes in fp32."""


def compiled_steps(name: str, context: int) -> CompiledSteps | str:
    """A decode step and a prefill of `context` tokens, or the reason why this machine has none.

    The first call on a machine compiles the step, which takes ten seconds to a minute; the result is cached on disk.
    """
    runner, [segment] = decoding(load_model(name, torch.float32, "cpu"), 1, context)
    reason = runner.use_executor()
    if reason:
        return reason
    whole = [Segment([5] * context, 0, segment.block_table)]
    size = runner.executor.packed.weights.nbytes + runner.executor.packed.head.nbytes
    return CompiledSteps(lambda: runner.run([segment]), lambda: runner.run(whole), size)


@dataclass(frozen=True)
class WholeStep:
    """One step of the model: what it must do and read, and how long it took."""

    kind: str
    batch: int
    context: int
    operations: int
    weight_bytes: int
    kv_bytes: int
    """Bytes of one request's cache."""
    seconds: float

    @property
    def num_bytes(self) -> int:
        """Bytes that it must read: the weights once, and the cache of every request."""
        return self.weight_bytes + self.batch * self.kv_bytes


def time_whole_steps(
    model: Decoder, name: str, shapes: Sequence[tuple[int, int]], context: int
) -> tuple[list[WholeStep], str]:
    """Time a decode step of each (batch, context) of `shapes`, and the prefill of `context` tokens, in eager mode.

    Where the machine can, one request's decode step at `context` tokens and the prefill are timed as compiled functions
    too. Returns the steps, prefills last, and the reason why none is compiled, or "". No model or cache is kept.
    """
    plain, compiled = weight_bytes(model), compiled_steps(name, context)
    steps = [("decode step, plain", batch, past, plain, decode_step(model, batch, past)) for batch, past in shapes]
    prefills = [("prefill, plain", 1, context, plain, prefill(model, context))]
    reason = compiled if isinstance(compiled, str) else ""
    if isinstance(compiled, CompiledSteps):
        steps.append(("decode step, compiled", 1, context, compiled.weight_bytes, compiled.decode))
        prefills.append(("prefill, compiled", 1, context, compiled.weight_bytes, compiled.prefill))
    steps += prefills
    took = medians(time_in_turn({number: step[-1] for number, step in enumerate(steps)}))
    pairs = context * (context + 1) // 2
    return [
        WholeStep(
            kind,
            batch,
            past,
            operations(model, past, pairs, 1) if "prefill" in kind else operations(model, batch, batch * past, batch),
            weights,
            kv_bytes(model.config, past),
            took[number],
        )
        for number, (kind, batch, past, weights, _) in enumerate(steps)
    ], reason


def of_width(config: ModelConfig, hidden: int) -> Decoder:
    """A model with as many layers as `config`, `hidden` wide, with random weights."""
    heads, kv_heads = hidden // 64, max(1, hidden // 192)
    sizes = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "head_dim": 64}
    return Decoder(replace(config, **sizes, num_heads=heads, num_kv_heads=kv_heads))


def additions(length: int, repeats: int) -> Run:
    """A function that adds two vectors of `length` numbers into a third, `repeats` times."""
    a, b, c = torch.randn(3, length)
    return lambda: [torch.add(a, b, out=c) for _ in range(repeats)]


# ----------------------------------------------------------------------------------------------------- other KV heads


@torch.no_grad()
def with_kv_heads(model: Decoder, num_kv_heads: int, conversion: Conversion) -> Decoder:
    """The same model with its key and value projections converted to `num_kv_heads` heads."""
    converted = Decoder(replace(model.config, num_kv_heads=num_kv_heads)).requires_grad_(False)
    parts = stored_parts(converted.config)
    for tensor_name, tensor in stored_tensors(model):
        if "k_proj" in tensor_name or "v_proj" in tensor_name:
            tensor = conversion(tensor, model.config.num_kv_heads, num_kv_heads)
        parts[tensor_name].of(converted).copy_(tensor)
    return converted


def repeat_heads(weight: Tensor, num_heads: int, num_copies: int) -> Tensor:
    """`[num_heads * head_dim, hidden]` → `[num_copies * head_dim, hidden]`: each head is repeated."""
    return weight.unflatten(0, (num_heads, -1)).repeat_interleave(num_copies // num_heads, 0).flatten(0, 1)


def first_head(weight: Tensor, num_heads: int, num_kv_heads: int) -> Tensor:
    """The first head of each group."""
    return weight.unflatten(0, (num_kv_heads, num_heads // num_kv_heads, -1))[:, 0].flatten(0, 1)


def sum_of_heads(weight: Tensor, num_heads: int, num_kv_heads: int) -> Tensor:
    """The heads of each group added up."""
    return weight.unflatten(0, (num_kv_heads, num_heads // num_kv_heads, -1)).sum(1).flatten(0, 1)


def random_heads(weight: Tensor, num_heads: int, num_kv_heads: int) -> Tensor:
    """Random numbers with the same standard deviation."""
    shape = (num_kv_heads * weight.shape[0] // num_heads, *weight.shape[1:])
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)) * weight.std()


def strided_groups(weight: Tensor, num_heads: int, num_kv_heads: int) -> Tensor:
    """The means of heads 0, 2, 4 and 1, 3, 5 instead of 0, 1, 2 and 3, 4, 5."""
    return weight.unflatten(0, (num_heads // num_kv_heads, num_kv_heads, -1)).mean(0).flatten(0, 1)


def neighbouring_rows(weight: Tensor, num_heads: int, num_kv_heads: int) -> Tensor:
    """The means of rows that follow each other: channels of one head, not the same channel of several heads."""
    return weight.unflatten(0, (-1, num_heads // num_kv_heads)).mean(1)


def checkpoint(model: Decoder, name: str, folder: Path) -> Path:
    """Write `model`, which is that of `name` with other KV heads, into `folder` as a checkpoint of the same family."""
    source = resolve(name)
    folder.mkdir(parents=True, exist_ok=True)
    copy_beside_weights(source, folder)
    stored = json.loads((source / "config.json").read_text(encoding="utf-8"))
    stored.pop("dtype", None)
    config = model.config
    stored |= {"num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim, "torch_dtype": "float32"}
    stored["tie_word_embeddings"] = config.tie_word_embeddings
    (folder / "config.json").write_text(json.dumps(stored, indent=2) + "\n", encoding="utf-8")
    tensors = {tensor_name: tensor.float().contiguous() for tensor_name, tensor in stored_tensors(model)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def generate_tokens(llm: LLM) -> list[int]:
    """Complete a prompt with 24 tokens, greedily."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    return list(llm.generate("def read_lines(path):\n", params, use_tqdm=False)[0].outputs[0].token_ids)


def bits_per_byte(llm: LLM) -> float:
    """Bits per byte of the model on held-out code; lower is better."""
    prompts = [p.prompt for p in held_out_prompts(32)]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    nats, size = 0.0, 0
    for output in outputs:
        ids = output.prompt_token_ids[1:]  # nothing predicts the first token
        nats -= sum(row[token].logprob for token, row in zip(ids, output.prompt_logprobs[1:], strict=True))
        size += len(llm.engine.tokenizer.decode(ids).encode())
    return nats / math.log(2) / size
