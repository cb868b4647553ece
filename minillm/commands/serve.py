"""`minillm serve`: an HTTP server with OpenAI's API. Flags have vLLM's names where vLLM has them."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any, TypeVar

from minillm.commands.command import Command
from minillm.errors import ConfigError, EngineDeadError
from minillm.extras import need
from minillm.serve.settings import MAX_NUM_QUEUED_REQS

EXAMPLES = """\
  minillm serve minicoder
  minillm serve minicoder --port 9000 --api-key secret --max-num-queued-reqs 256
  minillm serve minicoder --speculative-config '{"method": "suffix"}'
  curl localhost:8000/v1/completions -H 'Content-Type: application/json' \\
      -d '{"prompt": "def fib(n):", "max_tokens": 32, "temperature": 0}'
"""
Json = TypeVar("Json", bound="dict[str, Any] | list[Any]")
NEEDED = ("fastapi", "uvicorn", "prometheus_client")
API_KEY = "MINILLM_API_KEY"
"""The environment variable that holds the key if `--api-key` is not given: a command line is visible to others."""
ENGINE_OPTIONS = (
    *("dtype", "device", "seed", "quantization", "kv_cache_dtype", "kv_cache_config", "block_size", "num_kv_blocks"),
    *("kv_cache_memory_bytes", "gpu_memory_utilization", "max_model_len", "max_num_seqs", "max_num_batched_tokens"),
    *("enable_chunked_prefill", "long_prefill_token_threshold", "enable_prefix_caching", "scheduling_policy"),
    *("tensor_parallel_size", "enforce_eager", "speculative_config"),
)
"""Options that go to `EngineArgs`. One that was not given is None here and keeps the engine's default."""


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("model", help="bundled name, folder or hub id")
    server = parser.add_argument_group("server")
    server.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0: every one (default: local)")
    server.add_argument("--port", type=int, default=8000, help="0: a free one (default: %(default)s)")
    server.add_argument(
        "--api-key",
        nargs="+",
        metavar="KEY",
        help=f"ask for one of these keys (default: the one in ${API_KEY}, if set)",
    )
    server.add_argument(
        "--served-model-name", nargs="+", metavar="NAME", help="names that requests may use (default: the model's)"
    )
    server.add_argument(
        "--chat-template", type=Path, metavar="FILE", help="a Jinja template (default: the model's own)"
    )
    add_queue_option(server, "most unfinished sequences, waiting and running; more are answered 503")
    add_origins_option(server)
    server.add_argument(
        "--max-body-bytes",
        type=int,
        default=4 << 20,
        metavar="N",
        help="longer bodies are answered 413 (default: 4 MiB)",
    )
    server.add_argument(
        "--max-logprobs", type=int, default=20, metavar="N", help="most per position; -1: no limit (default: 20)"
    )
    server.add_argument(
        "--shutdown-timeout",
        type=int,
        default=30,
        metavar="S",
        help="seconds that running requests get to end when the server is stopped (default: %(default)s)",
    )
    server.add_argument(
        "--uvicorn-log-level",
        default="info",
        help="critical, error, warning, info, debug or trace; of uvicorn and minillm (default: %(default)s)",
    )
    server.add_argument("--disable-uvicorn-access-log", action="store_true", help="log no line per request")
    add_engine_options(parser)


def add_queue_option(parser: argparse._ActionsContainer, what: str) -> None:
    """Add `--max-num-queued-reqs`."""
    parser.add_argument(
        "--max-num-queued-reqs",
        type=int,
        default=MAX_NUM_QUEUED_REQS,
        metavar="N",
        help=f"{what} (default: %(default)s)",
    )


def add_origins_option(parser: argparse._ActionsContainer) -> None:
    """Add `--allowed-origins`."""
    parser.add_argument(
        "--allowed-origins",
        type=json_list,
        default=["*"],
        metavar="JSON",
        help="""origins of web pages that may use it, such as '["https://example.org"]' (default: '["*"]', all)""",
    )


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add `ENGINE_OPTIONS`, in a group of their own."""
    engine = parser.add_argument_group("engine (defaults as in `LLM`)")
    engine.add_argument("--dtype", help="auto, float32, float16 or bfloat16")
    engine.add_argument("--device", help="auto, cpu or cuda")
    engine.add_argument("--seed", type=int)
    engine.add_argument(
        "--quantization", "-q", help="int8, w8a8 or int4; a checkpoint of `minillm quantize` needs none"
    )
    engine.add_argument("--kv-cache-dtype", help="auto, int8 or int4")
    engine.add_argument("--kv-cache-config", type=json_object, metavar="JSON", help="a cache layout, as in LLM(...)")
    engine.add_argument("--block-size", type=int, metavar="N", help="tokens per cache block")
    engine.add_argument("--num-kv-blocks", type=int, metavar="N", help="size of the block pool")
    engine.add_argument("--kv-cache-memory-bytes", type=int, metavar="N", help="memory of the block pool")
    engine.add_argument("--gpu-memory-utilization", type=float, metavar="SHARE")
    engine.add_argument("--max-model-len", type=int, metavar="N", help="longest prompt plus completion, in tokens")
    engine.add_argument("--max-num-seqs", type=int, metavar="N", help="most requests that run at once")
    engine.add_argument("--max-num-batched-tokens", type=int, metavar="N", help="token budget of one step")
    engine.add_argument("--enable-chunked-prefill", action=argparse.BooleanOptionalAction, default=None)
    engine.add_argument(
        "--long-prefill-token-threshold", type=int, metavar="N", help="most prompt tokens of one request in a step"
    )
    engine.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=None)
    engine.add_argument("--scheduling-policy", help="fcfs or priority")
    engine.add_argument(
        "--tensor-parallel-size", "-tp", type=int, metavar="N", help="processes that the model is split over"
    )
    engine.add_argument("--enforce-eager", action="store_true", default=None, help="plain PyTorch")
    engine.add_argument("--speculative-config", type=json_object, metavar="JSON", help="as in LLM(...)")


def run(args: argparse.Namespace) -> int:
    """Listen, load the model, serve until a signal, drain. Raises `EngineDeadError` if the engine fails meanwhile."""
    need("serve", *NEEDED)
    if not args.shutdown_timeout >= 0:
        raise ConfigError(f"--shutdown-timeout {args.shutdown_timeout} must be at least 0 seconds")

    from minillm.async_llm import AsyncLLM
    from minillm.chat_template import ChatTemplate, read_template
    from minillm.config import EngineArgs
    from minillm.models.hub import resolve
    from minillm.serve.app import build_app
    from minillm.serve.server import allow_open_files, check_log_level, listen, make_server, url_of
    from minillm.serve.settings import ServerSettings
    from minillm.tokenizer import Tokenizer

    settings = ServerSettings(
        model_names=tuple(args.served_model_name or [args.model]),
        api_keys=api_keys(args),
        allowed_origins=tuple(args.allowed_origins),
        max_body_bytes=args.max_body_bytes,
        max_logprobs=args.max_logprobs,
    )
    check_log_level(args.uvicorn_log_level)
    read_template(args.chat_template)
    listener = listen(args.host, args.port)
    if args.chat_template is not None:  # before the weights are loaded: this may fail
        ChatTemplate(Tokenizer.from_folder(resolve(args.model)), args.model, args.chat_template)
    engine = AsyncLLM(engine_args(args, EngineArgs), max_num_queued_reqs=args.max_num_queued_reqs)
    try:
        template = ChatTemplate(engine.llm_engine.engine.tokenizer, args.model, args.chat_template)
        app = build_app(engine, settings, template)
        log_level, access_log = args.uvicorn_log_level, not args.disable_uvicorn_access_log
        server = make_server(app, engine, args.shutdown_timeout, log_level, access_log)
        allow_open_files(args.max_num_queued_reqs)
        url = url_of(*listener.getsockname()[:2])
        print(f"minillm serves {settings.model_names[0]} at {url}/v1", flush=True)
        server.run(sockets=[listener])
        if server.has_lost_engine:
            raise EngineDeadError(f"the engine has failed, so the server has ended: {engine.dead_error}")
    finally:
        engine.shutdown()
    return 0


def api_keys(args: argparse.Namespace) -> tuple[str, ...]:
    """Those of `--api-key`, or else the one in the environment."""
    return tuple(args.api_key or ([os.environ[API_KEY]] if os.environ.get(API_KEY) else []))


def engine_args(args: argparse.Namespace, kind: Any) -> Any:
    """The engine's options among `args`, as `kind`, which is `EngineArgs`."""
    return kind.from_options(args.model, given_engine_options(args))


def given_engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The engine's options that were given."""
    return {name: getattr(args, name) for name in ENGINE_OPTIONS if getattr(args, name) is not None}


def json_object(text: str) -> dict[str, Any]:
    """The type of an option that takes a JSON object."""
    return _json(text, dict, "object")


def json_list(text: str) -> list[Any]:
    """The type of an option that takes a JSON list."""
    return _json(text, list, "list")


def _json(text: str, kind: type[Json], name: str) -> Json:
    try:
        value = json.loads(text)
    except RecursionError:
        raise argparse.ArgumentTypeError("the JSON is nested too deeply") from None
    except ValueError as problem:
        raise argparse.ArgumentTypeError(f"{text[:200]!r} is not JSON: {problem}") from None
    if not isinstance(value, kind):
        raise argparse.ArgumentTypeError(f"{text[:200]!r} must be a JSON {name}")
    return value


COMMAND = Command(
    "serve",
    "Serve a model over HTTP with OpenAI's API: completions, chat, models, health, metrics.",
    EXAMPLES,
    options,
    run,
)
