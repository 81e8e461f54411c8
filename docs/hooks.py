"""Pages that mkdocs does not find under docs/: the repository's own documents, and the reference made from the code."""

from __future__ import annotations

import ast
import inspect
import os
import re
import runpy
import textwrap
from pathlib import Path
from typing import Any

import click
import sizing  # of this folder, which mkdocs makes importable
import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pydantic import BaseModel

from cluster.observe.metrics import descriptions
from secateur import requests
from secateur.batches_api import CreateBatchRequest
from secateur.bodies import UNSUPPORTED
from secateur.cli import app
from secateur.config import AppArgs, EngineArgs, ModelLoadingConfig, PlacementGroupConfig
from secateur.messages_api import CountTokensRequest, MessagesRequest
from secateur.responses_api import ResponsesRequest
from secateur.settings import settings_of
from secateur.speculative import Speculative, SpeculativeConfig
from secateur.vllm_names import ADVICE, SGLANG_ADVICE, SPECULATIVE_ADVICE
from workers.models import gguf
from workers.models.config_json import SUPPORTED_ARCHITECTURES
from workers.models.transformers_spec import TESTED

ROOT = Path(__file__).parents[1]
DOCUMENTS: dict[str, str] = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
"""Files of the repository's root, by the pages that they become."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    pages = {page: _with_site_links((ROOT / name).read_text(encoding="utf-8")) for name, page in DOCUMENTS.items()}
    pages |= {
        "reference/configuration.md": configuration(),
        "reference/http.md": http(),
        "reference/cli.md": command_line(),
        "reference/vllm.md": vllm(),
        "reference/metrics.md": metrics(),
        "reference/models.md": models(),
        "reference/sizing.md": sizing.page(),
    }
    for name, content in pages.items():
        files.append(File.generated(config, name, content=content))
    return files


def _with_site_links(text: str) -> str:
    """Point links at pages of the site; what is not on it becomes plain text."""

    def link(match: re.Match[str]) -> str:
        is_image, label, target = match.groups()
        if re.match(r"https?:|#", target):
            return match[0]
        if target in DOCUMENTS:
            return f"[{label}]({DOCUMENTS[target]})"
        if target.startswith("docs/"):
            return f"{is_image}[{label}]({target.removeprefix('docs/')})"
        return f"{label} (`{target}`)"

    return re.sub(r"(!?)\[([^\]]*)\]\(([^)]+)\)", link, text)


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Let pages link at the repository's documents, as they must be read without the site too."""
    depth = page.file.src_uri.count("/")

    def link(match: re.Match[str]) -> str:
        label, target, anchor = match.groups()
        inside = os.path.normpath(f"docs/{os.path.dirname(page.file.src_uri)}/{target}")
        if inside in DOCUMENTS:
            return f"[{label}]({'../' * depth}{DOCUMENTS[inside]}{anchor or ''})"
        return match[0] if inside.startswith("docs/") else f"{label} (`{inside}`)"

    return re.sub(r"\[([^\]]+)\]\((\.\./[^)#:]+)(#[^)]*)?\)", link, markdown)


def configuration() -> str:
    """Return the tables of all configuration keys."""
    parts = [
        "# Configuration keys",
        "A YAML file (`--config FILE`), the flags of `secateur serve` and `engine_kwargs` of a Serve application use "
        "these names. Every wrong value is reported before a process starts.",
        "## Engine",
        _table(EngineArgs),
        "## `speculative_config`",
        _table(SpeculativeConfig),
        "## `speculative`, per request",
        _table(Speculative),
        "## Serve application",
        "The `args` of an application whose `import_path` is `cluster.app:build`.",
        _table(AppArgs),
        "### `model_loading_config`",
        _table(ModelLoadingConfig),
        "### `placement_group_config`",
        _table(PlacementGroupConfig),
    ]
    return "\n\n".join(parts) + "\n"


_EVENT_ID = """\
Every event of their streams has an `id:` line behind its `data:` line. Treat it as opaque; it has only printable ASCII
characters. It names the request, its seeds and how many tokens of each choice its reader has, so any replica can go on
from it, also after a restart. An error event has none. Wrong ids are refused with status 400 and one of these codes:

| code | why |
| --- | --- |
| `invalid_event_id` | it is no id of this service |
| `event_id_of_another_request` | path, model, body or the model's sampling defaults differ |
| `not_resumable` | the answer does not repeat, see the [guide](../guides/http.md#streams-that-break-off) |

`answer_changed` (status 409, or an error event) tells that the answer came out differently, as after a near-tie of
rounding: nothing is spliced."""


def http() -> str:
    """Return the tables of the request bodies."""
    by_route = {
        "POST /v1/completions": requests.CompletionRequest,
        "POST /v1/chat/completions": requests.ChatCompletionRequest,
        "POST /v1/responses": ResponsesRequest,
        "POST /v1/messages": MessagesRequest,
        "POST /v1/messages/count_tokens": CountTokensRequest,
        "POST /v1/batches": CreateBatchRequest,
        "POST /tokenize": requests.TokenizeRequest,
        "POST /detokenize": requests.DetokenizeRequest,
    }
    parts = [
        "# HTTP requests",
        "Answers have OpenAI's shapes. `GET /v1/models`, `/health` and `/metrics` take no parameters. "
        "The [guide](../guides/http.md) says what differs from OpenAI and vLLM.",
    ]
    for route, body in by_route.items():
        parts += [f"## `{route}`", _table(body)]
    headers = "\n".join(f"| `{name}` | {meaning} |" for name, meaning in requests.REQUEST_HEADERS.items())
    parts += ["## Headers of completions and chats", f"| header | meaning |\n| --- | --- |\n{headers}", _EVENT_ID]
    unsupported = ", ".join(f"`{name}`" for name in sorted(UNSUPPORTED))
    parts += ["## Not implemented", f"A request that sets one of these is refused with status 400: {unsupported}."]
    return "\n\n".join(parts) + "\n"


VLLM_METRICS = frozenset(
    "num_requests_running num_requests_waiting kv_cache_usage_perc num_preemptions prefix_cache_queries "
    "prefix_cache_hits prompt_tokens generation_tokens request_success request_prompt_tokens "
    "request_generation_tokens request_params_max_tokens time_to_first_token_seconds inter_token_latency_seconds "
    "request_time_per_output_token_seconds e2e_request_latency_seconds request_queue_time_seconds "
    "request_inference_time_seconds request_prefill_time_seconds request_decode_time_seconds spec_decode_num_drafts "
    "spec_decode_num_draft_tokens spec_decode_num_accepted_tokens spec_decode_num_accepted_tokens_per_pos".split()
)
"""vLLM's metrics that we export under the same name, with `secateur_` in place of `vllm:`."""
VLLM_OTHERS = {
    "vllm:iteration_tokens_total": "the mean: `secateur_engine_generation_tokens_total` (or prompt tokens) by "
    "`secateur_engine_steps_total`",
    "vllm:request_max_num_generation_tokens": "`secateur_request_generation_tokens`, which has an entry per choice",
    "vllm:request_params_n": "none",
    "vllm:cache_config_info": "`num_pages` and `config` of `/server_info`",
    "vllm:lora_requests_info": "none: there are no adapters",
    "http_requests_total": "`secateur_http_requests_total`, with exact statuses",
    "http_request_duration_seconds": "`secateur_http_request_duration_seconds`",
}
"""Others of vLLM's, and what to use in their place."""


def metrics() -> str:
    """Return the tables of the metrics."""
    rows = ["| metric | type | labels | meaning | vLLM has it |", "| --- | --- | --- | --- | --- |"]
    for name, kind, labels, text in descriptions():
        name_there = "yes" if name.removeprefix("secateur_") in VLLM_METRICS else ""
        sample = f"{name}_total" if kind == "counter" else name
        rows.append(f"| `{sample}` | {kind} | {', '.join(labels)} | {text} | {name_there} |")
    others = ["| vLLM's | here |", "| --- | --- |", *(f"| `{name}` | {ours} |" for name, ours in VLLM_OTHERS.items())]
    parts = [
        "# Metrics",
        "`GET /metrics` answers in Prometheus's text format. [Metrics and dashboards](../guides/monitoring.md) says "
        "how to query several replicas. Names that vLLM has, too, mean the same, with `secateur_` in place of `vllm:`.",
        "\n".join(rows),
        "The replica's process has Prometheus's standard metrics `process_cpu_seconds_total`, "
        "`process_resident_memory_bytes`, `process_virtual_memory_bytes`, `process_start_time_seconds`, "
        "`process_open_fds` and `process_max_fds`, with the labels `model_name` and `replica`. The ranks are other "
        "processes.",
        "## Others of vLLM's",
        "\n".join(others),
    ]
    return "\n\n".join(parts) + "\n"


def models() -> str:
    """Return the table of the architectures that the tests compare with transformers."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    in_gguf = {*gguf.ARCHITECTURES.values(), "MistralForCausalLM"}  # which calls itself llama
    rows = ["| architecture in config.json | decoder | quantised | GGUF |", "| --- | --- | --- | --- |"]
    for name in SUPPORTED_ARCHITECTURES:
        rows.append(f"| `{name}` | own | in its bits on GPUs | {'yes' if name in in_gguf else ''} |")
    for name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type] for model_type in TESTED):
        rows.append(f"| `{name}` | transformers' class | dequantised | |")
    parts = [
        "# Models",
        "The tests compare the logits of each of these with transformers: prompts, trees and chunks, on one rank and "
        "on two (`tests/workers/models`). All of them are drafted for, since EAGLE-3 heads, draft models and n-gram "
        "lookup need nothing of the architecture, and all but hybrids (Qwen3.5) draft. Others whose attention "
        "transformers lets us replace load, too, and are untested; those without a tensor-parallel plan in "
        "transformers on one rank. [Models](../guides/models.md) has formats and exceptions, "
        "[limits](../guides/limits.md) what is missing.",
        "\n".join(rows),
        *_published(),
    ]
    return "\n\n".join(parts) + "\n"


def _published() -> list[str]:
    """Return the tables of published checkpoints that `tests/workers/models/test_published.py` reads."""
    found = runpy.run_path(str(Path(__file__).parents[1] / "tests" / "support" / "published.py"))
    targets = ["| model | ranks | command, or what is told |", "| --- | --- | --- |"]
    for target in found["TARGETS"]:
        told = f"refused: {target.told}" if target.told else f"`secateur serve {target.name}`"
        targets.append(f"| {target.name} | {'' if target.told else target.ranks} | {told} |")
    heads = ["| head | method | what to add to the command of its target, or what is told |", "| --- | --- | --- |"]
    for head in found["HEADS"]:
        added = f'`--speculative-config \'{{"model": "{head.name}"}}\'`'
        heads.append(f"| {head.name} | `{head.method}` | {f'refused: {head.told}' if head.told else added} |")
    return [
        "## Published checkpoints",
        "What becomes of them, by smaller configurations of the same classes, fields and formats "
        "(`tests/support/published.py`). Their weights have not been here. That quantised weights equal their format's "
        "own dequantisation is tested with small random models (`tests/workers/models/test_quantization.py`).",
        "\n".join(targets),
        "## Published heads",
        "\n".join(heads),
    ]


def command_line() -> str:
    """Return every command's help text."""
    command = typer.main.get_command(app)
    parts = ["# Command line"]

    def add(command: Any, names: list[str]) -> None:
        context = click.Context(command, info_name=" ".join(names), terminal_width=100, max_content_width=100)
        help_text = inspect.cleandoc(command.get_help(context))
        parts.append(f"{'#' * min(1 + len(names), 4)} `{' '.join(names)}`\n\n```text\n{help_text}\n```")
        for name, own in getattr(command, "commands", {}).items():
            if not own.hidden:
                add(own, [*names, name])

    add(command, ["secateur"])
    return "\n\n".join(parts) + "\n"


def vllm() -> str:
    """Return the table of vLLM's settings that have another name here, or none."""
    rows = [f"| `--{name}` | {text} |" for name, text in sorted(ADVICE.items())]
    keys = [f"| `{name}` | {text} |" for name, text in sorted(SPECULATIVE_ADVICE.items())]
    others = [f"| `--{name}` | {text} |" for name, text in sorted(SGLANG_ADVICE.items())]
    parts = [
        "# vLLM's other settings",
        "Options of vLLM that Secateur does not have, and what to do instead. Options that begin with "
        "`--lora-` or `--mm-` are answered alike. [Coming from vLLM](../guides/coming-from-vllm.md) has those that "
        "both have.",
        "\n".join(["| vLLM | here |", "| --- | --- |", *rows]),
        "## Keys of `speculative_config`",
        "\n".join(["| vLLM | here |", "| --- | --- |", *keys]),
        "## SGLang's options",
        "Without those that vLLM has too.",
        "\n".join(["| SGLang | here |", "| --- | --- |", *others]),
    ]
    return "\n\n".join(parts) + "\n"


def _table(model: type[BaseModel]) -> str:
    """Return a Markdown table of a model's fields: name, type, default, the flag's help and the docstring."""
    flags = {name: setting.text for name, setting in settings_of(model).items()}
    texts: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if base.__module__.startswith("secateur."):
            texts |= _field_docstrings(base)
    rows = ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
    for name, field in model.model_fields.items():
        kind = re.sub(r"\b(typing|secateur)\.(\w+\.)*|<class '([\w.]+)'>", r"\3", str(field.annotation))
        default = "" if field.is_required() else f"`{field.get_default(call_default_factory=True)!r}`"
        cells = (f"`{name}`", f"`{kind}`", default, f"{flags.get(name, '')} {texts.get(name, '')}")
        rows.append("| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def _field_docstrings(model: type) -> dict[str, str]:
    """Return the strings that stand below a class's fields."""
    [tree] = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    assert isinstance(tree, ast.ClassDef)
    return {
        field.target.id: text.value.value
        for field, text in zip(tree.body, tree.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }
