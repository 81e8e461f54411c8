"""`secateur bench`: flags become a plan of `secateur.bench`, which the service's `cluster.bench` runs."""

# No `from __future__ import annotations` here: typer reads the annotations below as objects.
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from secateur.cli.checks import check_none_given, checked
from secateur.cli.command import Command
from secateur.cli.options import ApiKey, AsJson, BaseUrl, LogLevel, ModelArgument, ModelName
from secateur.cli.usage import Group
from secateur.errors import ConfigError
from secateur.flags import with_engine_flags
from secateur.install import needs_extra, service_part
from secateur.prompts import BUNDLED_PROMPTS, read_prompts

MAX_PROMPTS = 32
"""Most prompts that the benchmarks read; further requests repeat them."""

bench_app = typer.Typer(
    cls=Group, help="Measure an engine's steps, and a service under load.", no_args_is_help=True, rich_markup_mode=None
)

PromptsFile = Annotated[
    Path, typer.Option("--prompts", metavar="FILE", help='JSONL of {"text": ...} or {"messages": [...]}.')
]
Output = Annotated[Path, typer.Option("--output", metavar="DIR", file_okay=False, help="Where the results go.")]
Quick = Annotated[bool, typer.Option("--quick", help="A few cells, in a minute.")]
Batches = Annotated[list[int] | None, typer.Option("--batches", metavar="N ...", help="Requests at a time.")]
MaxTokens = Annotated[int | None, typer.Option("--max-tokens", help="Tokens per answer [48].")]
Rounds = Annotated[int | None, typer.Option("--rounds", help="Rounds; the report gives medians [3].")]

MOVED = {"acceptance": "acceptance", "latency": "speed", "throughput": "speed"}
"""Commands of earlier versions, and the module of `bench/` in the repository that replaced each."""


@bench_app.callback()
def bench_root() -> None:
    """Measure an engine's steps, and a service under load."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: engines are stopped, rows so far are kept


@bench_app.command("step", cls=Command)
@with_engine_flags(server=False)
def bench_step(
    engine: dict[str, Any],
    model: ModelArgument = None,
    batches: Batches = None,
    nodes: Annotated[
        list[int] | None, typer.Option("--nodes", metavar="N ...", help="Draft nodes per step [0 4 8 16].")
    ] = None,
    max_tokens: MaxTokens = None,
    rounds: Rounds = None,
    prompts: PromptsFile = BUNDLED_PROMPTS,
    output: Output = Path("results"),
    quick: Quick = False,
    log_level: LogLevel = None,
    as_json: AsJson = False,
) -> None:
    """Measure the parts of a step, by nodes and requests: JSON and Markdown.

    Starts its own engines, on this machine and without Ray.

    Example: secateur bench step --batches 1 8 --nodes 0 8 16 --output results
    """
    from secateur.bench import StepPlan, check_drafter

    options = {
        "batches": batches,
        "nodes": nodes,
        "max_tokens": max_tokens,
        "rounds": rounds,
    }
    base = StepPlan.quick() if quick else StepPlan()
    plan = StepPlan.load(base.model_dump() | given(options))
    args = checked(engine, model=model)
    check_drafter(args, max(plan.nodes))
    texts = read_prompts(prompts, min(max(plan.batches), MAX_PROMPTS))
    typer.echo(service_part("bench_step")(args, plan, texts, output, say, as_json=as_json))


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
    prompts: PromptsFile = BUNDLED_PROMPTS,
    output: Output = Path("results"),
    quick: Quick = False,
    log_level: LogLevel = None,
    as_json: AsJson = False,
) -> None:
    """Measure a service under load: TTFT, TPOT, ITL, E2E percentiles and goodput: JSON and Markdown.

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
    }
    base = ServePlan.quick() if quick else ServePlan()
    plan = ServePlan.load(base.model_dump() | given(options))
    if concurrency and request_rate:
        raise ConfigError("--concurrency and --request-rate are two kinds of load; give one of them")
    args = None
    if base_url is None:
        args = checked(engine, model=model, port=0, api_key=api_key)
    else:
        check_base_url(base_url)
        check_none_given(engine)
    texts = read_prompts(prompts, min(plan.num_requests, MAX_PROMPTS))
    run = service_part("bench_serve", or_base_url=True)
    service = {"base_url": base_url, "api_key": api_key, "model": model if base_url else None}
    try:
        report = run(args, plan, texts, output, say, **service, as_json=as_json)
    except ModuleNotFoundError as error:  # only a service of our own needs more than the client's packages
        raise needs_extra(error, or_base_url=True) from error
    typer.echo(report)


def _moved(module: str) -> Callable[[typer.Context], None]:
    def moved(ctx: typer.Context) -> None:
        raise ConfigError(
            f"`secateur bench {ctx.info_name}` has left the package; in a checkout of the repository, "
            f"`python -m bench.{module}` measures that"
        )

    return moved


for name, module in MOVED.items():
    anything = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    bench_app.command(name, hidden=True, context_settings=anything)(_moved(module))


def given(options: dict[str, Any]) -> dict[str, Any]:
    """Return the given options, with lists as tuples."""
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    return {key: value for key, value in values.items() if value is not None and value != ()}


def say(line: str) -> None:
    """Report progress on stderr."""
    typer.echo(line, err=True)
