"""`secateur bench`: flags become a plan of `secateur.bench`, which `cluster.bench` runs."""

# No `from __future__ import annotations` here: typer reads the annotations below as objects.
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from secateur.cli.checks import check_none_given, checked, needs_extra
from secateur.cli.command import Command
from secateur.cli.options import ApiKey, AsJson, BaseUrl, ModelArgument, ModelName
from secateur.errors import ConfigError, Problem
from secateur.flags import with_engine_flags, with_speed_flags
from secateur.prompts import BUNDLED_PROMPTS, read_prompts

if TYPE_CHECKING:  # pydantic takes longer to import than --help may take
    from secateur.bench import SpeedPlan
    from secateur.config import EngineArgs

MAX_PROMPTS = 32
"""Most prompts that the speed benchmarks read; further requests repeat them."""

bench_app = typer.Typer(help="Measure what speculation gains.", no_args_is_help=True, rich_markup_mode=None)

PromptsFile = Annotated[
    Path, typer.Option("--prompts", metavar="FILE", help='JSONL of {"text": ...} or {"messages": [...]}.')
]
Output = Annotated[Path, typer.Option("--output", metavar="DIR", file_okay=False, help="Where the results go.")]
Quick = Annotated[bool, typer.Option("--quick", help="A few cells, in a minute.")]
Batches = Annotated[list[int] | None, typer.Option("--batches", metavar="N ...", help="Requests at a time.")]
MaxTokens = Annotated[int | None, typer.Option("--max-tokens", help="Tokens per answer [48].")]
Rounds = Annotated[int | None, typer.Option("--rounds", help="Rounds; the report gives medians [3].")]
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
PeersFolder = Annotated[
    Path,
    typer.Option(
        "--peers",
        metavar="DIR",
        file_okay=False,
        envvar="SECATEUR_PEERS",
        show_envvar=False,
        help="Where `make peers` put the other projects [$SECATEUR_PEERS, else .peers].",
    ),
]


@bench_app.callback()
def bench_root() -> None:
    """Measure what speculation gains."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: engines are stopped, rows so far are kept


@bench_app.command("acceptance", cls=Command)
@with_engine_flags(server=False)
def bench_acceptance(
    engine: dict[str, Any],
    model: ModelArgument = None,
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
    prompts: PromptsFile = BUNDLED_PROMPTS,
    output: Output = Path("results"),
    quick: Quick = False,
    as_json: AsJson = False,
) -> None:
    """Measure acceptance by temperature, tree, acceptance rule, node budget and pruning: JSON, Markdown and plots.

    Starts its own engines, one after the other, on this machine and without Ray.

    Example: secateur bench acceptance --temperatures 0 1 --nodes 8 16 --output results
    """
    from secateur.bench import AcceptancePlan, check_drafter

    options = {
        "temperatures": temperatures,
        "nodes": nodes,
        "num_prompts": num_prompts,
        "max_tokens": max_tokens,
        "concurrency": concurrency,
        "seed": seed,
    }
    base = AcceptancePlan.quick() if quick else AcceptancePlan()
    plan = AcceptancePlan.load(base.model_dump() | _given(options))
    args = checked(engine, model=model)
    check_drafter(args, max(plan.nodes))
    texts = read_prompts(prompts, plan.num_prompts)
    if len(texts) < plan.num_prompts:
        has = f"{prompts} has {len(texts)} prompts"
        raise ConfigError(Problem("--num-prompts", f"{has}; ask for at most that many, not {plan.num_prompts}"))
    try:
        from cluster.bench.acceptance import run
    except ModuleNotFoundError as error:
        raise needs_extra(error) from error
    typer.echo(run(args, plan, texts, output, say=_say, as_json=as_json))


@bench_app.command("latency", cls=Command)
@with_engine_flags(server=False)
@with_speed_flags()
def bench_latency(
    engine: dict[str, Any],
    options: dict[str, Any],
    model: ModelArgument = None,
    target_cost: TargetCost = None,
    cache: Cache = None,
    peers: PeersFolder = Path(".peers"),
    prompts: PromptsFile = BUNDLED_PROMPTS,
    output: Output = Path("results"),
    quick: Quick = False,
    as_json: AsJson = False,
) -> None:
    """Measure the time per token of ours, transformers and other projects: JSON, Markdown and a plot.

    All contestants stay up and take turns, on this machine and without Ray.

    Example: secateur bench latency --target-cost 300m --batches 1 4 --output results
    """
    from secateur.bench import SpeedPlan

    base = SpeedPlan.quick() if quick else SpeedPlan()
    plan = _speed_plan(base, options | {"target_cost": target_cost})
    args = checked(engine, model=model)
    _bench_speed("latency", args, plan, prompts, output, as_json=as_json, cache=cache, peers=peers)


@bench_app.command("throughput", cls=Command)
@with_engine_flags(server=False)
@with_speed_flags()
def bench_throughput(
    engine: dict[str, Any],
    options: dict[str, Any],
    model: ModelArgument = None,
    target_cost: TargetCost = None,
    cache: Cache = None,
    peers: PeersFolder = Path(".peers"),
    prompts: PromptsFile = BUNDLED_PROMPTS,
    output: Output = Path("results"),
    quick: Quick = False,
    as_json: AsJson = False,
) -> None:
    """Measure tokens per second by the number of concurrent requests: JSON, Markdown and a plot.

    All contestants stay up and take turns, on this machine and without Ray.

    Example: secateur bench throughput --batches 1 8 32 --contestants off,dynamic,auto,generate --output results
    """
    from secateur.bench import SpeedPlan

    base = SpeedPlan.quick() if quick else SpeedPlan.throughput()
    plan = _speed_plan(base, options | {"target_cost": target_cost})
    args = checked(engine, model=model)
    _bench_speed("throughput", args, plan, prompts, output, as_json=as_json, cache=cache, peers=peers)


def _speed_plan(base: "SpeedPlan", options: dict[str, Any]) -> "SpeedPlan":
    if options["contestants"] is not None:
        names = [name.strip().replace("-", "_") for name in options["contestants"].split(",")]
        options = options | {"contestants": names}
    return type(base).load(base.model_dump() | _given(options))


def _bench_speed(
    name: str,
    args: "EngineArgs",
    plan: "SpeedPlan",
    prompts: Path,
    output: Path,
    *,
    as_json: bool,
    cache: Path | None,
    peers: Path,
) -> None:
    from secateur.bench import check_drafter

    check_drafter(args, plan.nodes)
    texts = read_prompts(prompts, min(max(plan.num_prompts, *plan.batches) * plan.rounds, MAX_PROMPTS))
    try:
        from cluster.bench.speed import run
    except ModuleNotFoundError as error:
        raise needs_extra(error) from error
    typer.echo(run(args, plan, texts, output, _say, name=name, as_json=as_json, cache=cache, peers=peers))


@bench_app.command("step", cls=Command)
@with_engine_flags(server=False)
def bench_step(
    engine: dict[str, Any],
    model: ModelArgument = None,
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
    as_json: AsJson = False,
) -> None:
    """Measure the parts of a step, and its cost by nodes, requests and context: JSON, Markdown and plots.

    On CUDA also the memory bandwidth, and how close a forward comes to reading the weights once.

    Example: secateur bench step --target-cost 300m --batches 1 8 --nodes 0 8 16 --output results
    """
    from secateur.bench import StepPlan, check_drafter

    options = {
        "rows": rows,
        "batches": batches,
        "contexts": contexts,
        "nodes": nodes,
        "max_tokens": max_tokens,
        "rounds": rounds,
        "target_cost": target_cost,
    }
    base = StepPlan.quick() if quick else StepPlan()
    plan = StepPlan.load(base.model_dump() | _given(options))
    args = checked(engine, model=model)
    check_drafter(args, max(plan.nodes))
    texts = read_prompts(prompts, min(max(plan.batches), MAX_PROMPTS))
    try:
        from cluster.bench.step import run
    except ModuleNotFoundError as error:
        raise needs_extra(error) from error
    typer.echo(run(args, plan, texts, output, _say, as_json=as_json, cache=cache))


@bench_app.command("trace", cls=Command)
@with_engine_flags(server=False)
def bench_trace(
    engine: dict[str, Any],
    model: ModelArgument = None,
    modes: Annotated[
        list[str] | None, typer.Option("--modes", metavar="MODE ...", help="Of overlap [none predraft alternate auto].")
    ] = None,
    nodes: Annotated[int | None, typer.Option("--nodes", help="Draft nodes per step [16].")] = None,
    batches: Batches = None,
    temperatures: Annotated[list[float] | None, typer.Option("--temperatures", metavar="T ...", help="[0 1]")] = None,
    max_tokens: MaxTokens = None,
    rounds: Rounds = None,
    target_cost: TargetCost = None,
    cache: Cache = None,
    prompts: PromptsFile = BUNDLED_PROMPTS,
    output: Output = Path("results"),
    quick: Quick = False,
    as_json: AsJson = False,
) -> None:
    """Record what drafter and verifier do at the same time: timelines, the share of drafting that is hidden, a plot.

    The timelines are in Chrome's trace format; chrome://tracing and Perfetto show them.

    Example: secateur bench trace --target-cost 300m --batches 1 8 --output results
    """
    from secateur.bench import TracePlan, check_drafter, check_overlap

    options = {
        "modes": modes,
        "nodes": nodes,
        "batches": batches,
        "temperatures": temperatures,
        "max_tokens": max_tokens,
        "rounds": rounds,
        "target_cost": target_cost,
    }
    base = TracePlan.quick() if quick else TracePlan()
    plan = TracePlan.load(base.model_dump() | _given(options))
    args = checked(engine, model=model)
    check_drafter(args, plan.nodes)
    check_overlap(args)
    texts = read_prompts(prompts, min(max(plan.batches) * (plan.rounds + 1), MAX_PROMPTS))
    try:
        from cluster.bench.trace import run
    except ModuleNotFoundError as error:
        raise needs_extra(error) from error
    typer.echo(run(args, plan, texts, output, _say, as_json=as_json, cache=cache))


@bench_app.command("serve", cls=Command)
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
    as_json: AsJson = False,
) -> None:
    """Measure a service under load: TTFT, TPOT, ITL, E2E percentiles and goodput: JSON, Markdown and plots.

    Example: secateur bench serve --base-url http://127.0.0.1:8000 --request-rate 1 4 --goodput-tpot-ms 50
    """
    from secateur.bench import ServePlan
    from secateur.client import check_base_url

    if compare is None:
        compare = base_url is None
    options = {
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
    plan = ServePlan.load(base.model_dump() | _given(options))
    if concurrency and request_rate:
        raise ConfigError("--concurrency and --request-rate are two kinds of load; give one of them")
    args = None
    if base_url is None:
        args = checked(engine, model=model, port=0, api_key=api_key)
    else:
        check_base_url(base_url)
        check_none_given(engine | {"target_cost": target_cost})
    texts = read_prompts(prompts, min(plan.num_requests, MAX_PROMPTS))
    name = model if base_url else None
    try:
        from cluster.bench.serve import run

        service = {"base_url": base_url, "api_key": api_key, "model": name}
        report = run(args, plan, texts, output, _say, **service, as_json=as_json, cache=cache)
    except ModuleNotFoundError as error:  # only a service of our own needs more than the client's packages
        raise needs_extra(error, or_base_url=True) from error
    typer.echo(report)


def _given(options: dict[str, Any]) -> dict[str, Any]:
    """Return the given options, with lists as tuples."""
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    return {key: value for key, value in values.items() if value is not None and value != ()}


def _say(line: str) -> None:
    typer.echo(line, err=True)
