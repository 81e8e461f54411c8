"""The `secateur` command.

Validation comes first and is fast; what needs Ray or torch is imported inside a command's body, after it.
Exit codes: 0 done, 1 failed, 2 wrong usage or configuration, 130 interrupted.
"""

# No `from __future__ import annotations` here: typer reads the annotations below as objects.
import os
import sys
import time
import warnings
from collections.abc import Generator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from secateur import __version__
from secateur.bench import AcceptancePlan, ServePlan, SpeedPlan, StepPlan, check_drafter
from secateur.config import EngineArgs, resolve_model
from secateur.errors import ConfigError, SecateurError
from secateur.flags import ManyNumbers, engine_args_from, with_engine_flags, with_sampling_flags, with_speed_flags
from secateur.plan import HARDWARE, PlanRequest, read_acceptance, read_costs, read_hardware, read_trace
from secateur.prompts import BUNDLED_PROMPTS, read_prompts

MAX_PROMPTS = 32
"""Read for the benchmarks of speed; more requests than that ask the same again."""

# rich's tables would fold the examples, and its tracebacks would bury our one-line errors.
app = typer.Typer(
    name="secateur",
    help="Serve language models with tree speculative decoding, and talk to such a service.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
batch_app = typer.Typer(
    help="Answer files of requests (OpenAI's batch format).", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(batch_app, name="batch")
bench_app = typer.Typer(help="Measure what speculation gains.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(bench_app, name="bench")

Stats = Annotated[bool, typer.Option("--stats", help="Print acceptance length and speed to stderr at the end.")]
BaseUrl = Annotated[
    str | None, typer.Option("--base-url", help="A running service; without it one is started here and stopped again.")
]
ApiKey = Annotated[str | None, typer.Option("--api-key", help="Default: the environment's SECATEUR_API_KEY.")]
ModelName = Annotated[
    str | None,
    typer.Option("--model", help="The model to start [the bundled one]; with --base-url, its name there."),
]

BenchModel = Annotated[str | None, typer.Argument(help="Folder or Hugging Face id [the bundled model].")]
PromptsFile = Annotated[
    Path, typer.Option("--prompts", metavar="FILE", help='JSONL of {"text": ...} or {"messages": [...]}.')
]
Output = Annotated[Path, typer.Option("--output", metavar="DIR", file_okay=False, help="Where the results go.")]
Quick = Annotated[bool, typer.Option("--quick", help="A few cells, in a minute.")]
Batches = Annotated[list[int] | None, typer.Option("--batches", metavar="N ...", help="Requests at a time.")]
MaxTokens = Annotated[int | None, typer.Option("--max-tokens", help="Tokens per answer [48].")]
Rounds = Annotated[int | None, typer.Option("--rounds", help="Turns of everybody; medians count [3].")]
TargetCost = Annotated[
    str | None,
    typer.Option(
        "--target-cost",
        metavar="300m|8b|HIDDENxLAYERS",
        help="Pad the target with zeros to the cost of a larger model: the same function, tokens and acceptance.",
    ),
]
Cache = Annotated[
    Path | None,
    typer.Option("--cache", metavar="DIR", file_okay=False, help="Keep the padded models there [not kept]."),
]


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


@app.command()
@with_engine_flags(server=True)
def serve(
    engine: dict[str, Any],
    model: Annotated[str | None, typer.Argument(help="Folder or Hugging Face id [the bundled model].")] = None,
) -> None:
    """Serve a model over HTTP, on Ray, until Ctrl-C.

    Example: secateur serve meta-llama/Llama-3.1-8B-Instruct -tp 2 -sc '{"method": "eagle3", "model":
    "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "num_speculative_tokens": 24}'
    """
    args = _checked(engine, model=model)
    try:
        from cluster.app import serve as serve_on_ray
    except ModuleNotFoundError as error:
        raise _needs_extra(error) from error
    serve_on_ray(args)


@app.command(cls=ManyNumbers)
@with_engine_flags(server=True)
def plan(
    engine: dict[str, Any],
    model: Annotated[str | None, typer.Argument(help="Folder or Hugging Face id [the bundled model].")] = None,
    costs: Annotated[
        Path | None, typer.Option("--costs", metavar="FILE", help="Predict from a cost table (JSON).")
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Predict from this machine's costs: starts an engine for a minute.")
    ] = False,
    costs_output: Annotated[
        Path | None, typer.Option("--costs-output", metavar="FILE", help="Write the profiled cost table.")
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(
            "--hardware", metavar="NAME|FILE", help=f"Predict from published figures: {', '.join(HARDWARE)}, or JSON."
        ),
    ] = None,
    acceptance: Annotated[
        Path | None,
        typer.Option("--acceptance", metavar="FILE", help="Rows of `secateur bench acceptance`, or chances by child."),
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option("--batch", metavar="B ...", help="Requests that decode together [1 2 4 .. 64].")
    ] = None,
    context: Annotated[int | None, typer.Option("--context", help="Tokens each has in the cache [512].")] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", help="Of the requests [0].")] = None,
    nodes: Annotated[
        int | None, typer.Option("--nodes", help="Draft nodes of every tree; 0 is none [the best for each batch].")
    ] = None,
    request_rate: Annotated[
        float | None, typer.Option("--request-rate", metavar="X", help="Simulate so many requests per second.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE", help="Simulate JSONL of seconds, prompt_tokens, output_tokens."),
    ] = None,
    replicas: Annotated[int | None, typer.Option("--replicas", help="Simulated engines [1].")] = None,
    num_requests: Annotated[int | None, typer.Option("--num-requests", help="Simulated requests [10000].")] = None,
    prompt_tokens: Annotated[
        str | None, typer.Option("--prompt-tokens", metavar="N", help="Such as 512, 64-512 or exp:512 [512].")
    ] = None,
    output_tokens: Annotated[str | None, typer.Option("--output-tokens", metavar="N", help="Likewise [128].")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show where drafter and verifier would run and whether they fit; predict speed, tree sizes and whole fleets.

    Touches no GPU and starts nothing, but for --profile.

    Example: secateur plan -tp 2 --speculative-config '{"method": "draft_model", "model": "bundled:draft"}'

    Example: secateur plan --hardware h100 --batch 1 8 64 --replicas 100 --request-rate 5000
    """
    asked = {
        "costs": read_costs(costs) if costs else None,
        "profile": profile or None,
        "costs_output": costs_output,
        "hardware": read_hardware(hardware) if hardware else None,
        "acceptance": read_acceptance(acceptance) if acceptance else None,
        "batches": tuple(batch) if batch else None,
        "context": context,
        "temperature": temperature,
        "nodes": nodes,
        "request_rate": request_rate,
        "trace": read_trace(trace) if trace else None,
        "replicas": replicas,
        "num_requests": num_requests,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
    }
    request = PlanRequest.load({key: value for key, value in asked.items() if value is not None})
    args = _checked(engine, model=model)
    try:
        from cluster.plan.report import run
    except ModuleNotFoundError as error:
        raise _needs_extra(error) from error
    typer.echo(run(args, request, as_json=as_json, say=lambda line: typer.echo(line, err=True)))


@app.command()
@with_engine_flags(server=False)
@with_sampling_flags()
def complete(
    engine: dict[str, Any],
    sampling: dict[str, Any],
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    base_url: BaseUrl = None,
    api_key: ApiKey = None,
    model: ModelName = None,
    stats: Stats = False,
) -> None:
    """Continue a text, streaming to stdout.

    Example: secateur complete "def quicksort(items):" --max-tokens 64 --temperature 0 --stats
    """
    from secateur.client import Client

    with _service(engine, base_url, model, api_key) as url, Client(url, api_key=api_key) as client:
        chunks = client.stream_complete(prompt, model=model if base_url else None, **sampling, **_stats_params(stats))
        _print_stream(chunks, stats)


@app.command()
@with_engine_flags(server=False)
@with_sampling_flags()
def chat(
    engine: dict[str, Any],
    sampling: dict[str, Any],
    message: Annotated[str | None, typer.Argument(help="One message; without it a conversation starts.")] = None,
    base_url: BaseUrl = None,
    api_key: ApiKey = None,
    model: ModelName = None,
    system: Annotated[str | None, typer.Option("--system", help="Instructions before the conversation.")] = None,
    stats: Stats = False,
) -> None:
    """Chat with a model: one message, or a conversation (Ctrl-D ends it).

    Example: secateur chat "Write a loop over a list." --base-url http://127.0.0.1:8000
    """
    from secateur.client import Client

    turns: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    with _service(engine, base_url, model, api_key) as url, Client(url, api_key=api_key) as client:
        while (text := message if message is not None else _next_message()) is not None:
            turns.append({"role": "user", "content": text})
            chunks = client.stream_chat(turns, model=model if base_url else None, **sampling, **_stats_params(stats))
            turns.append({"role": "assistant", "content": _print_stream(chunks, stats)})
            if message is not None:
                return


@batch_app.callback()
def batch_root() -> None:
    """Answer files of requests (OpenAI's batch format)."""


@batch_app.command("run")
def batch_run(
    input_path: Annotated[Path, typer.Argument(metavar="IN.jsonl", help="One request per line.")],
    output_path: Annotated[Path, typer.Option("-o", "--output", metavar="OUT.jsonl", help="One answer per line.")],
    base_url: Annotated[str, typer.Option("--base-url", help="The running service.")] = "http://127.0.0.1:8000",
    api_key: ApiKey = None,
    concurrency: Annotated[int, typer.Option("--concurrency", min=1, help="Requests in flight.")] = 16,
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Keep the lines already answered, or start over.")
    ] = True,
    retries: Annotated[int, typer.Option("--retries", min=0, help="Tries again per request.")] = 5,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds to wait for an answer.")] = 600.0,
) -> None:
    """Answer every line of a file. Stop it at any moment and run it again: answered lines are not sent twice.

    Example: secateur batch run questions.jsonl -o answers.jsonl --concurrency 32
    """
    from secateur.batch import run_batch

    summary = run_batch(
        input_path,
        output_path,
        base_url=base_url,
        api_key=api_key,
        concurrency=concurrency,
        resume=resume,
        retries=retries,
        timeout=timeout,
    )
    typer.echo(str(summary), err=True)
    raise typer.Exit(summary.exit_code)


@bench_app.callback()
def bench_root() -> None:
    """Measure what speculation gains."""


@bench_app.command("acceptance", cls=ManyNumbers)
@with_engine_flags(server=False)
def bench_acceptance(
    engine: dict[str, Any],
    model: Annotated[str | None, typer.Argument(help="Folder or Hugging Face id [the bundled model].")] = None,
    temperatures: Annotated[
        list[float] | None, typer.Option("--temperatures", metavar="T ...", help="[0 0.3 0.5 0.7 1 1.3 1.5 2]")
    ] = None,
    nodes: Annotated[
        list[int] | None, typer.Option("--nodes", metavar="N ...", help="Draft nodes per step [4 8 16 32].")
    ] = None,
    num_prompts: Annotated[int | None, typer.Option("--num-prompts", help="Prompts per cell [24].")] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", help="Tokens per answer [32].")] = None,
    concurrency: Annotated[int | None, typer.Option("--concurrency", help="Requests in flight [8].")] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Every cell has the same seeds, made from this one [0].")
    ] = None,
    prompts: Annotated[
        Path, typer.Option("--prompts", metavar="FILE", help='JSONL of {"text": ...} or {"messages": [...]}.')
    ] = BUNDLED_PROMPTS,
    output: Annotated[
        Path, typer.Option("--output", metavar="DIR", file_okay=False, help="Where the results go.")
    ] = Path("results"),
    quick: Annotated[bool, typer.Option("--quick", help="A few cells, in a minute.")] = False,
) -> None:
    """Acceptance by temperature, tree, acceptance rule, node budget and pruning: JSON, Markdown and plots.

    Starts its own engines, one after the other, on this machine and without Ray.

    Example: secateur bench acceptance --temperatures 0 1 --nodes 8 16 --output results
    """
    asked = {
        "temperatures": temperatures,
        "nodes": nodes,
        "num_prompts": num_prompts,
        "max_tokens": max_tokens,
        "concurrency": concurrency,
        "seed": seed,
    }
    base = AcceptancePlan.quick() if quick else AcceptancePlan()
    plan = AcceptancePlan.load(base.model_dump() | _given(asked))
    args = _checked(engine, model=model)
    check_drafter(args, max(plan.nodes))
    texts = read_prompts(prompts, plan.num_prompts)
    try:
        from cluster.bench.acceptance import run
    except ModuleNotFoundError as error:
        raise _needs_extra(error) from error
    typer.echo(run(args, plan, texts, output, say=_say))


@bench_app.command("latency", cls=ManyNumbers)
@with_engine_flags(server=False)
@with_speed_flags()
def bench_latency(
    engine: dict[str, Any],
    asked: dict[str, Any],
    model: BenchModel = None,
    target_cost: TargetCost = None,
    cache: Cache = None,
    prompts: PromptsFile = BUNDLED_PROMPTS,
    output: Output = Path("results"),
    quick: Quick = False,
) -> None:
    """Time per output token, without and with speculation and beside transformers: JSON, Markdown and a plot.

    All contestants stay up and take turns, on this machine and without Ray.

    Example: secateur bench latency --target-cost 300m --batches 1 4 --output results
    """
    base = SpeedPlan.quick() if quick else SpeedPlan()
    plan = _speed_plan(base, asked | {"target_cost": target_cost})
    args = _checked(engine, model=model)
    _bench_speed("latency", args, plan, cache, prompts, output)


@bench_app.command("throughput", cls=ManyNumbers)
@with_engine_flags(server=False)
@with_speed_flags()
def bench_throughput(
    engine: dict[str, Any],
    asked: dict[str, Any],
    model: BenchModel = None,
    target_cost: TargetCost = None,
    cache: Cache = None,
    prompts: PromptsFile = BUNDLED_PROMPTS,
    output: Output = Path("results"),
    quick: Quick = False,
) -> None:
    """Tokens per second of many requests, by how many run at a time: JSON, Markdown and a plot.

    All contestants stay up and take turns, on this machine and without Ray.

    Example: secateur bench throughput --batches 1 8 32 --contestants off,dynamic,auto,generate --output results
    """
    base = SpeedPlan.quick() if quick else SpeedPlan.throughput()
    plan = _speed_plan(base, asked | {"target_cost": target_cost})
    args = _checked(engine, model=model)
    _bench_speed("throughput", args, plan, cache, prompts, output)


def _speed_plan(base: SpeedPlan, asked: dict[str, Any]) -> SpeedPlan:
    if asked["contestants"] is not None:
        names = [name.strip().replace("-", "_") for name in asked["contestants"].split(",")]
        asked = asked | {"contestants": names}
    return SpeedPlan.load(base.model_dump() | _given(asked))


def _bench_speed(name: str, args: EngineArgs, plan: SpeedPlan, cache: Path | None, prompts: Path, output: Path) -> None:
    check_drafter(args, plan.nodes)
    texts = read_prompts(prompts, min(max(plan.num_prompts, *plan.batches), MAX_PROMPTS))
    try:
        from cluster.bench.speed import run
    except ModuleNotFoundError as error:
        raise _needs_extra(error) from error
    typer.echo(run(args, plan, texts, output, _say, name=name, cache=cache))


@bench_app.command("step", cls=ManyNumbers)
@with_engine_flags(server=False)
def bench_step(
    engine: dict[str, Any],
    model: BenchModel = None,
    rows: Annotated[
        list[int] | None, typer.Option("--rows", metavar="N ...", help="Rows per forward [1 2 4 5 8 9 17 33].")
    ] = None,
    batches: Batches = None,
    contexts: Annotated[
        list[int] | None, typer.Option("--contexts", metavar="N ...", help="Tokens of context [128 512 1024].")
    ] = None,
    nodes: Annotated[
        list[int] | None, typer.Option("--nodes", metavar="N ...", help="Draft nodes per step [0 4 8 16].")
    ] = None,
    max_tokens: MaxTokens = None,
    rounds: Rounds = None,
    target_cost: TargetCost = None,
    cache: Cache = None,
    prompts: PromptsFile = BUNDLED_PROMPTS,
    output: Output = Path("results"),
    quick: Quick = False,
) -> None:
    """Where the time of a step goes, and its cost by nodes, requests and context: JSON, Markdown and plots.

    On CUDA also the memory bandwidth, and how close a forward comes to reading the weights once.

    Example: secateur bench step --target-cost 300m --batches 1 8 --nodes 0 8 16 --output results
    """
    asked = {
        "rows": rows,
        "batches": batches,
        "contexts": contexts,
        "nodes": nodes,
        "max_tokens": max_tokens,
        "rounds": rounds,
        "target_cost": target_cost,
    }
    base = StepPlan.quick() if quick else StepPlan()
    plan = StepPlan.load(base.model_dump() | _given(asked))
    args = _checked(engine, model=model)
    check_drafter(args, max(plan.nodes))
    texts = read_prompts(prompts, min(max(plan.batches), MAX_PROMPTS))
    try:
        from cluster.bench.step import run
    except ModuleNotFoundError as error:
        raise _needs_extra(error) from error
    typer.echo(run(args, plan, texts, output, _say, cache=cache))


@bench_app.command("serve", cls=ManyNumbers)
@with_engine_flags(server=False)
def bench_serve(
    engine: dict[str, Any],
    base_url: BaseUrl = None,
    api_key: ApiKey = None,
    model: ModelName = None,
    num_requests: Annotated[int | None, typer.Option("--num-requests", help="Requests per load [32].")] = None,
    concurrency: Annotated[
        list[int] | None, typer.Option("--concurrency", metavar="N ...", help="Clients at a time [1 4 16].")
    ] = None,
    request_rate: Annotated[
        list[float] | None,
        typer.Option("--request-rate", metavar="R ...", help="Instead: arrivals per second, a Poisson process."),
    ] = None,
    max_tokens: MaxTokens = None,
    temperature: Annotated[float | None, typer.Option("--temperature", help="[0]")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Of arrivals and sampling [0].")] = None,
    compare: Annotated[
        bool | None,
        typer.Option("--compare/--no-compare", help="Each load again without speculation [only where started here]."),
    ] = None,
    goodput_ttft_ms: Annotated[
        float | None, typer.Option("--goodput-ttft-ms", help="A good request's first token comes within this.")
    ] = None,
    goodput_tpot_ms: Annotated[
        float | None, typer.Option("--goodput-tpot-ms", help="... and its further tokens take at most this each.")
    ] = None,
    target_cost: TargetCost = None,
    cache: Cache = None,
    prompts: PromptsFile = BUNDLED_PROMPTS,
    output: Output = Path("results"),
    quick: Quick = False,
) -> None:
    """A service under load: TTFT, TPOT, ITL, E2E percentiles and goodput: JSON, Markdown and plots.

    Example: secateur bench serve --base-url http://127.0.0.1:8000 --request-rate 1 4 --goodput-tpot-ms 50
    """
    if compare is None:
        compare = base_url is None
    asked = {
        "num_requests": num_requests,
        "concurrency": concurrency,
        "request_rates": request_rate,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": seed,
        "compare": compare,
        "goodput_ttft_ms": goodput_ttft_ms,
        "goodput_tpot_ms": goodput_tpot_ms,
        "target_cost": target_cost,
    }
    base = ServePlan.quick() if quick else ServePlan()
    plan = ServePlan.load(base.model_dump() | _given(asked))
    if concurrency and request_rate:
        raise ConfigError("--concurrency and --request-rate are two kinds of load; give one of them")
    args = None
    if base_url is None:
        args = _checked(engine, model=model, port=0, api_key=api_key)
    else:
        _check_none_given(engine | {"target_cost": target_cost})
    texts = read_prompts(prompts, min(plan.num_requests, MAX_PROMPTS))
    try:
        from cluster.bench.load import run
    except ModuleNotFoundError as error:
        raise _needs_extra(error) from error
    name = model if base_url else None
    typer.echo(run(args, plan, texts, output, _say, base_url=base_url, api_key=api_key, model=name, cache=cache))


def _given(asked: dict[str, Any]) -> dict[str, Any]:
    """What was typed, lists as the plans' tuples."""
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in asked.items()}
    return {key: value for key, value in values.items() if value is not None and value != ()}


def _say(line: str) -> None:
    typer.echo(line, err=True)


def _checked(flags: dict[str, Any], **more: Any) -> EngineArgs:
    """Valid engine arguments whose local files exist. Raises ConfigError."""
    flags = {**flags, **{key: value for key, value in more.items() if value is not None}}
    if flags.get("api_key") is None and (key := os.environ.get("SECATEUR_API_KEY")):
        flags["api_key"] = key
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        args = engine_args_from(flags)
    for warning in caught:
        typer.echo(f"secateur: warning: {warning.message}", err=True)
    resolve_model(args.model)
    if args.speculative_config is not None and args.speculative_config.model is not None:
        resolve_model(args.speculative_config.model)
    return args


def _check_none_given(engine: dict[str, Any]) -> None:
    if given := sorted(name for name, value in engine.items() if value is not None):
        flags = ", ".join("--" + name.replace("_", "-") for name in given)
        raise ConfigError(f"{flags}: for a service started here, which --base-url replaces; remove one of them")


def _service(
    engine: dict[str, Any], base_url: str | None, model: str | None, api_key: str | None
) -> AbstractContextManager[str]:
    """The service to talk to: the given one, or one of our own for as long as the context lasts."""
    if base_url is not None:
        _check_none_given(engine)
        return nullcontext(base_url)
    args = _checked(engine, model=model, port=0, api_key=api_key)
    try:
        from cluster.service import local_service
    except ModuleNotFoundError as error:
        raise _needs_extra(error) from error
    service: AbstractContextManager[str] = local_service(args)
    return service


def _needs_extra(error: ModuleNotFoundError) -> SecateurError:
    return SecateurError(
        f"this command runs models here and needs {error.name!r}, which is not installed: "
        "pip install 'secateur[serve]' (or talk to a running service with --base-url)"
    )


def _stats_params(stats: bool) -> dict[str, Any]:
    if not stats:
        return {}
    return {"return_speculative_stats": True, "stream_options": {"include_usage": True}}


def _print_stream(chunks: Generator[Any], stats: bool) -> str:
    """Write chunks to stdout as they come; returns the whole text."""
    started, parts, usage, speculation = time.monotonic(), [], None, None
    for chunk in chunks:
        sys.stdout.write(chunk.text)
        sys.stdout.flush()
        parts.append(chunk.text)
        usage, speculation = chunk.usage or usage, chunk.speculative or speculation
    sys.stdout.write("\n")
    if stats:
        typer.echo(_stats_line(usage, speculation, time.monotonic() - started), err=True)
    return "".join(parts)


def _stats_line(usage: Any, speculation: Any, seconds: float) -> str:
    parts = []
    if usage is not None:
        tokens = usage.completion_tokens
        parts.append(f"{tokens} tokens in {seconds:.2f} s ({tokens / max(seconds, 1e-9):.1f} tokens/s)")
    if speculation is not None:
        parts.append(
            f"acceptance length {speculation.acceptance_length:.2f} "
            f"({speculation.num_draft_tokens} tokens drafted, {speculation.num_verified} verified, "
            f"{speculation.num_accepted_tokens} accepted in {speculation.num_drafts} steps)"
        )
    return "; ".join(parts) or "the service sent no statistics"


def _next_message() -> str | None:
    """The next line typed, or None at the end of input."""
    while True:
        try:
            text = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return None
        if text.strip():
            return text


def main(argv: list[str] | None = None) -> int:
    """Run the command line; errors become one message on stderr and an exit code."""
    try:
        app(args=argv, prog_name="secateur")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    except ConfigError as error:
        return _fail(error, 2)
    except SecateurError as error:
        return _fail(error, 1)
    return 0


def _fail(error: Exception, code: int) -> int:
    typer.echo(f"secateur: error: {error}", err=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
