"""`minillm cluster`: many replicas on a Ray cluster: serve, generate, sweep, grade."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

from minillm.commands import grade, serve
from minillm.commands.bench import names, numbers, positive
from minillm.commands.command import Command
from minillm.commands.output_checks import check_new_file

if TYPE_CHECKING:
    from minillm.cluster.worker_pool import WorkerPool

EXAMPLES = """\
  minillm cluster serve minicoder --replicas 2
  minillm cluster generate prompts.jsonl --out results/ --workers 2 --sampling '{"max_tokens": 64, "temperature": 0}'
  minillm cluster sweep --out sweep/ --methods draft_model,suffix --drafts 2,4,8 --block-sizes 16,32
  minillm cluster grade submissions/ --out report/ --workers 4
  minillm cluster failover --requests 500
                                    two nodes on this machine; a replica is killed; every request is answered once
"""


def options(parser: argparse.ArgumentParser) -> None:
    """Add the jobs and their options."""
    jobs = parser.add_subparsers(title="jobs", metavar="JOB", required=True, parser_class=argparse.ArgumentParser)

    def job(name: str, summary: str, run_it: Any) -> argparse.ArgumentParser:
        made = jobs.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        made.set_defaults(job=run_it)
        if name != "failover":
            made.add_argument(
                "--address",
                metavar="ADDRESS",
                help="a Ray cluster that runs: its address, or auto (default: one is started on this machine)",
            )
        return made

    _serve_options(job("serve", "One address with OpenAI's API in front of replicas of a model.", _serve))
    _generate_options(job("generate", "Complete the prompts of a file, each once; go on after a stop.", _generate))
    _sweep_options(job("sweep", "Speculation by method, drafts and block size; go on after a stop.", _sweep))
    grading = job("grade", "`minillm grade` with the submissions spread over a cluster.", _grade)
    grade.add_what_to_grade(grading)
    _worker_options(grading)
    _failover_options(job("failover", "Kill a replica under load, and count the answers.", _failover))


def run(args: argparse.Namespace) -> int:
    """Run one job."""
    from minillm.cluster.session import check_ray

    check_ray()
    code: int = args.job(args)
    return code


def _worker_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=positive, default=1, metavar="N", help="workers at a time (default: 1)")
    parser.add_argument("--cpus", type=float, default=1, metavar="N", help="processors of a worker (default: 1)")
    parser.add_argument("--gpus", type=float, default=0, metavar="N", help="GPUs of a worker (default: 0)")


def _pool(args: argparse.Namespace) -> WorkerPool:
    from minillm.cluster.worker_pool import WorkerPool

    return WorkerPool(args.workers, args.cpus, args.gpus, args.address)


def _bar(unit: str) -> Any:
    from tqdm import tqdm

    return lambda iterable, total: tqdm(iterable, total=total, unit=unit, disable=None)


# --- serve -----------------------------------------------------------------------------------------------------------


def _serve_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="bundled name, hub id, or a folder that every machine has")
    parser.add_argument("--replicas", type=positive, default=2, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--gateways", type=positive, default=1, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--cpus", type=float, default=1, metavar="N", help="processors of a replica (default: 1)")
    parser.add_argument("--gpus", type=float, default=0, metavar="N", help="GPUs of a replica (default: 0)")
    router_help = "which replica gets a request: by prefix and load, or the less loaded of two (default: %(default)s)"
    parser.add_argument("--router", choices=("prefix", "power_of_two"), default="prefix", help=router_help)
    imbalance_help = "requests that a replica may have more than the least loaded one (default: %(default)s)"
    parser.add_argument("--max-imbalance", type=int, default=16, metavar="N", help=imbalance_help)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0: every one (default: local)")
    parser.add_argument("--port", type=positive, default=8000, help="(default: %(default)s)")
    key_help = f"ask for one of these keys (default: the one in ${serve.API_KEY}, if set)"
    parser.add_argument("--api-key", nargs="+", metavar="KEY", help=key_help)
    serve.add_queue_option(parser, "most unfinished sequences of a replica; as many more wait, others are answered 503")
    serve.add_origins_option(parser)
    parser.add_argument("--served-model-name", nargs="+", default=(), metavar="NAME", help="(default: the model's)")
    parser.add_argument("--chat-template", type=Path, metavar="FILE", help="a Jinja template that every machine has")
    serve.add_engine_options(parser)


def _serve(args: argparse.Namespace) -> int:
    from minillm.chat_template import ChatTemplate, read_template
    from minillm.cluster.replica import ReplicaSettings
    from minillm.cluster.session import ray_session, set_environment
    from minillm.models.hub import resolve
    from minillm.models.loading import load_config
    from minillm.tokenizer import Tokenizer

    read_template(args.chat_template)
    replica = ReplicaSettings(
        args.model,
        serve.given_engine_options(args),
        model_names=tuple(args.served_model_name),
        allowed_origins=tuple(args.allowed_origins),
        max_num_queued_reqs=args.max_num_queued_reqs,
        chat_template=str(args.chat_template) if args.chat_template else None,
    )
    set_environment()
    from minillm.cluster.application import ClusterSettings, serving

    settings = ClusterSettings(
        replica,
        num_replicas=args.replicas,
        num_gateways=args.gateways,
        cpus_per_replica=args.cpus,
        gpus_per_replica=args.gpus,
        router=args.router,
        max_imbalance=args.max_imbalance,
        api_keys=serve.api_keys(args),
    )
    if args.address is None:  # all is on this machine, the model, too
        folder = resolve(args.model)
        load_config(folder)
        ChatTemplate(Tokenizer.from_folder(folder), args.model, args.chat_template)
    signal.signal(signal.SIGTERM, _stop)  # before anything is started
    with ray_session(args.address):
        signal.signal(signal.SIGTERM, _stop)  # again: `ray.init` has set a handler of its own
        with serving(settings, args.host, args.port) as url:
            print(f"minillm serves {args.replicas} replicas of {args.model} at {url}/v1", flush=True)
            try:
                Event().wait()
            finally:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)  # after Ctrl-C, too, everything is stopped
    return 0


def _stop(*_: object) -> None:
    """End this program from wherever it is, so that what it has started is stopped. A second signal changes nothing."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(0)


# --- generate --------------------------------------------------------------------------------------------------------


def _generate_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompts", type=Path, help='JSON lines: {"prompt": "…"} and perhaps an "id"')
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the parts")
    parser.add_argument("--model", default="minicoder", help="bundled name, hub id, or a folder that every machine has")
    sampling_help = "options of SamplingParams (default: greedy, 16 tokens)"
    parser.add_argument("--sampling", type=serve.json_object, default={}, metavar="JSON", help=sampling_help)
    parser.add_argument("--shard", type=positive, default=256, metavar="N", help="prompts per part (default: 256)")
    _worker_options(parser)
    serve.add_engine_options(parser)


def _generate(args: argparse.Namespace) -> int:
    from minillm.cluster.generation import GenerationSettings, failed_rows, generate_file

    sampling = {"temperature": 0.0, **args.sampling}
    settings = GenerationSettings(args.model, serve.given_engine_options(args), sampling)
    parts = generate_file(args.prompts, args.out, settings, _pool(args), args.shard, _bar("part"))
    print(f"{len(parts)} parts are in {args.out}; cat {args.out}/part-*.jsonl is all of them, in order")
    if failed := failed_rows(parts):
        first = f"the first, with the id {failed[0]['id']!r}: {failed[0]['error']}"
        print(f"minillm: prompts that could not be run: {len(failed)}; {first}", file=sys.stderr)
        return 1
    return 0


# --- sweep -----------------------------------------------------------------------------------------------------------


def _sweep_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the points")
    parser.add_argument("--model", help="(default: minicoder)")
    parser.add_argument("--draft", metavar="MODEL", help="the draft model (default: the bundled one)")
    parser.add_argument("--methods", type=names, metavar="A,B", help="(default: draft_model,ngram,suffix)")
    parser.add_argument("--drafts", type=numbers, metavar="N,N", help="draft tokens per round (default: 2,4,8)")
    parser.add_argument("--block-sizes", type=numbers, metavar="N,N", help="tokens per cache block (default: 16)")
    parser.add_argument("--slices", type=names, metavar="A,B", help="kinds of text (default: all)")
    parser.add_argument("--weights", help="fp32, int8 or w8a8 (default: fp32)")
    parser.add_argument("--batch", type=positive, metavar="N", help="requests together (default: 1)")
    for name, what in (("rounds", "measure N times in turn"), ("prompts", "per slice"), ("new-tokens", "per prompt")):
        parser.add_argument(f"--{name}", type=positive, metavar="N", help=what)
    _worker_options(parser)


def _sweep(args: argparse.Namespace) -> int:
    from dataclasses import fields

    from minillm.cluster.sweep import SweepSettings, sweep, table
    from minillm.commands.tables import print_table

    given = {f.name: getattr(args, f.name) for f in fields(SweepSettings) if getattr(args, f.name) is not None}
    lists = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    rows = sweep(args.out, SweepSettings(**{**given, **lists}), _pool(args), _bar("point"))
    print_table(table(rows))
    return 0


# --- grade, failover -------------------------------------------------------------------------------------------------


def _grade(args: argparse.Namespace) -> int:
    from minillm.cluster.grading import graders_of

    args.jobs = args.workers
    return grade.run(args, graders_of(_pool(args)))


def _failover_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="(default: minicoder)")
    for name, what in (
        ("requests", "how many (default: 500)"),
        ("replicas", "over the two nodes (default: 3)"),
        ("documents", "that the prompts begin with (default: 12)"),
        ("document-tokens", "of each (default: 128)"),
        ("new-tokens", "of each answer (default: 8)"),
        ("concurrent", "requests at a time (default: 24)"),
    ):
        parser.add_argument(f"--{name}", type=positive, metavar="N", help=what)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result to FILE")


def _failover(args: argparse.Namespace) -> int:
    if args.json:
        check_new_file("--json", args.json)
    from dataclasses import fields

    from minillm.bench.harness import save
    from minillm.cluster.failover import FailoverSettings, passed, run, table
    from minillm.commands.tables import print_table

    known = {f.name for f in fields(FailoverSettings)}
    result = run(FailoverSettings(**{n: value for n, value in vars(args).items() if n in known and value is not None}))
    if args.json:  # before it is printed, which may fail
        save(result, args.json)
    print_table(table(result))
    return 0 if passed(result) else 1


COMMAND = Command(
    "cluster",
    "Use many machines: replicas behind one address, batch generation, sweeps and grading, on Ray.",
    EXAMPLES,
    options,
    run,
)
