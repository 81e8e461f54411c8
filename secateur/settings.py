"""The settings of an engine, its service and its drafter, each written once: name, type, default, flag and meaning.

`secateur.config` and `secateur.speculative` make checked models of these classes, `secateur.flags` the flags of the
command line, `secateur.vllm_names` reads vLLM's spellings by them, and docs/hooks.py writes the reference. A flag's
help opens the reference's text, too, and the text below a field adds to it. A field without a flag has that text alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, dataclass_transform, get_args, get_origin, get_type_hints

from secateur.token_tree import MAX_NODES

MODEL, SPECULATION, LIMITS, SERVING = "Model", "Speculation", "Limits", "Serving"
"""Groups of flags."""
SHORTEST_REQUEST = 2
"""One prompt token and one output token."""
_THINKING = (
    *("deepseek_r1", "deepseek_v3", "ernie45", "glm45", "glm47", "holo2", "kimi_k2", "mimo", "minimax_m2"),
    *("nemotron_v3", "olmo3", "qwen3", "step3", "step3p5"),
)
"""vLLM's parsers of reasoning between <think> and </think>."""
_SAME_CALLS = {
    "glm47": "glm45",
    "granite4": "hermes",
    "llama4_json": "llama3_json",
    "mimo": "qwen3_coder",
    "qwen3_xml": "qwen3_coder",
}
"""vLLM's parsers of tool calls -> those of the same format."""

Method = Literal["ngram", "draft_model", "eagle", "eagle3", "mtp", "dspark", "dflash"]
WEIGHTS: dict[Method, Literal["own", "target", "none"]] = {
    "ngram": "none",
    "draft_model": "own",
    "eagle": "own",
    "eagle3": "own",
    "mtp": "target",
    "dspark": "own",
    "dflash": "own",
}
"""Where a method's weights are: in a checkpoint of its own, which `model` names, in the target's, or nowhere."""
TreePrune = Literal["off", "thresholds", "auto"]
Acceptance = Literal["coupled", "rejection"]


class Bounds:
    """Bounds of a value, by the names of pydantic's `Field`, which takes longer to import than --help may take."""

    def __init__(self, **bounds: float) -> None:
        self._bounds = bounds

    def __repr__(self) -> str:
        return f"Bounds({', '.join(f'{name}={value}' for name, value in self._bounds.items())})"

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> dict[str, Any]:
        """Return the checks that pydantic makes."""
        return {**handler(source), **self._bounds}


@dataclass(frozen=True, slots=True)
class Flag:
    """The flag of a field, which has the field's name."""

    help: str
    """Without the period at its end."""
    group: str
    _: KW_ONLY
    short: str = ""
    metavar: str = ""
    """What stands for the value. A value with choices then is any text to the flag, and only the field checks it."""
    default: str | None = None
    """What the help says of the default; None = its value, if it has one."""
    has_unit: bool = False
    """The value may be 32k or 1.5M."""
    vllm_values: Mapping[str, str] = field(default_factory=dict)
    """vLLM's other names of values, with ours."""
    vllm_names: tuple[str, ...] = ()
    """vLLM's flags in whose place this one stands."""


class Setting(NamedTuple):
    """A field that has a flag."""

    flag: Flag
    kinds: tuple[Any, ...]
    """The types of its value, None excluded."""
    default: Any

    @property
    def text(self) -> str:
        """Return what --help says."""
        default = self._default if self.flag.default is None else self.flag.default
        text = " ".join(filter(None, [self.flag.help, default and f"[{default}]"]))
        return f"{text}." if self.flag.help else text

    @property
    def _default(self) -> str:
        match self.default:
            case True:
                return "on"
            case False | None | "" | []:
                return ""
            case [*items]:
                return " ".join(items)
            case float():
                return f"{self.default:g}"
            case _:
                return str(self.default)


@cache
def settings_of(fields: type) -> dict[str, Setting]:
    """Return the fields of a class that have flags."""
    found = {}
    for name, hint in get_type_hints(fields, include_extras=True).items():
        if flags := [item for item in getattr(hint, "__metadata__", ()) if isinstance(item, Flag)]:
            found[name] = Setting(flags[0], tuple(_kinds_of(hint)), getattr(fields, name))
    return found


def _kinds_of(hint: Any) -> Iterator[Any]:
    origin = get_origin(hint)
    if origin is Annotated:
        yield from _kinds_of(get_args(hint)[0])
    elif origin in (Union, UnionType):
        for part in get_args(hint):
            yield from _kinds_of(part)
    elif hint is not NoneType:
        yield hint


PositiveInt = Annotated[int, Bounds(ge=1)]
Probability = Annotated[float, Bounds(ge=0.0, le=1.0)]
ModelName = Annotated[str, Bounds(min_length=1)]


@dataclass_transform(kw_only_default=True)
class Settings:
    """Base of classes of fields: so type checkers know the arguments of the models that are made of them."""


class EngineSettings(Settings):
    """One engine: what `secateur serve` takes as flags and `--config` as YAML.

    `model` is an argument of the commands, and `speculative_config` a flag of its own in `secateur.flags`.
    """

    model: str = "bundled:target"
    """Folder, GGUF file, Hugging Face id, 'smollm2' or 'bundled:target' (also what a null stands for)."""
    tokenizer: Annotated[str | None, Flag("Folder or id", MODEL, default="the model's own")] = None
    generation_config: Annotated[
        Literal["auto", "none"],
        Flag(
            "Default sampling parameters: the model's generation_config.json (auto) or OpenAI's (none)",
            MODEL,
            vllm_values={"vllm": "none"},
        ),
    ] = "auto"
    revision: Annotated[str | None, Flag("Branch, tag or commit of a Hugging Face id", MODEL)] = None
    tensor_parallel_size: Annotated[PositiveInt, Flag("Devices of the verifier", MODEL, short="-tp")] = 1
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Flag(
            "Type of weights and activations",
            MODEL,
            default="auto: float32 on CPU; on CUDA the checkpoint's, bfloat16 for float32",
            vllm_values={"half": "float16", "float": "float32"},
        ),
    ] = "auto"
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8"],
        Flag(
            "Keys and values in the model's dtype, or in 8 bits (fp8, which is e4m3)",
            MODEL,
            vllm_values={"fp8_e4m3": "fp8"},
        ),
    ] = "auto"
    """It is the same for target and drafter, and the scale is 1. On CUDA the Triton kernels then need compute
    capability 8.9 or higher."""
    device: Annotated[Literal["auto", "cpu", "cuda"], Flag("Where models run", MODEL)] = "auto"
    kernels: Annotated[
        Literal["auto", "torch", "triton"],
        Flag(
            "Implementation of attention and other operations",
            MODEL,
            default="auto: triton on CUDA, torch on CPU",
            vllm_names=("attention-backend", "attention-config", "moe-backend"),
        ),
    ] = "auto"
    enforce_eager: Annotated[bool, Flag("Do not capture CUDA graphs", MODEL)] = False
    batch_invariant: Annotated[bool, Flag("In bfloat16: the same text whatever else is drafted or served", MODEL)] = (
        False
    )
    threads: Annotated[
        PositiveInt | None,
        Flag("Threads of a verifier rank on CPU", MODEL, default="1; in bfloat16 all cores, shared by the ranks"),
    ] = None
    """In float32 most products run on one thread. The cores are those that the process may use."""

    no_speculation: Annotated[bool, Flag("Decode without a drafter", SPECULATION)] = False

    online_learning: Annotated[
        Literal["off", "on"],
        Flag("Let the draft head learn from what it is served, while it waits. No token changes", SPECULATION),
    ] = "off"
    """Requests opt out with `"store": false` or the header `X-Secateur-Learn: off`."""
    online_learning_path: Annotated[
        str | None,
        Flag("The folder of the learnt heads; a restart goes on from the newest", SPECULATION, metavar="DIR"),
    ] = None

    max_model_len: Annotated[
        Annotated[int, Bounds(ge=SHORTEST_REQUEST)] | None,
        Flag(
            "Prompt plus output, in tokens, such as 8192, 32k or 32K",
            LIMITS,
            metavar="N",
            default="the model's",
            has_unit=True,
        ),
    ] = None
    max_num_seqs: Annotated[int, Bounds(ge=1, le=1 << 16), Flag("Requests running at once", LIMITS)] = 64
    max_num_batched_tokens: Annotated[
        int, Bounds(ge=1, le=1 << 24), Flag("Tokens per step", LIMITS, metavar="N", has_unit=True)
    ] = 2048
    page_size: Annotated[
        int, Bounds(ge=1, le=1 << 12), Flag("Tokens per KV page", LIMITS, vllm_names=("block-size",))
    ] = 16
    num_pages: Annotated[
        Annotated[int, Bounds(ge=1, lt=1 << 31)] | None,
        Flag(
            "KV pages, of which one is never used",
            LIMITS,
            default="as many as fit",
            vllm_names=("num-gpu-blocks-override",),
        ),
    ] = None
    enable_prefix_caching: Annotated[bool, Flag("Reuse the KV cache of common prompt prefixes", LIMITS)] = True
    scheduling_policy: Annotated[
        Literal["fcfs", "priority"],
        Flag("Serve requests in order of arrival, or by their `priority`, lower numbers first", LIMITS),
    ] = "fcfs"
    gpu_memory_utilization: Annotated[float, Bounds(gt=0.0, le=1.0), Flag("Share of each GPU to use", LIMITS)] = 0.9
    hang_timeout: Annotated[
        float,
        Bounds(ge=0.0, le=3600.0),
        Flag("Seconds after which a rank that makes no progress is replaced; 0 = never", LIMITS),
    ] = 10.0
    """A rank is replaced that shows no sign of life, or no progress of a step. On GPUs one forward pass must take
    less."""
    startup_timeout: Annotated[
        float,
        Bounds(gt=0.0, le=86400.0),
        Flag("Seconds in which an engine must load its weights, compile and capture CUDA graphs", LIMITS),
    ] = 3600.0
    standby: Annotated[
        bool, Flag("Keep a process from which lost ranks are forked, so that they are back in seconds", LIMITS)
    ] = True

    seed: Annotated[int | None, Flag("Seed for requests that do not set one", SERVING)] = None
    """None draws one per request."""
    served_model_name: Annotated[
        ModelName | Annotated[list[ModelName], Bounds(min_length=1)] | None,
        Flag(
            "The name that clients use, or several names; answers carry the first one",
            SERVING,
            metavar="NAME ...",
            default="the model's",
        ),
    ] = None
    host: Annotated[str, Flag("Address to listen on", SERVING)] = "127.0.0.1"
    port: Annotated[int, Bounds(ge=0, le=65535), Flag("Port to listen on; 0 takes a free one", SERVING)] = 8000
    api_server_count: Annotated[
        Annotated[int, Bounds(ge=1, le=63)] | None,
        Flag(
            "Serve without Ray, with this many processes that speak HTTP before one engine on this machine",
            SERVING,
            short="-asc",
            default="one, on Ray",
        ),
    ] = None
    """They are one service: limits, metrics and stored responses are those of all together."""
    shutdown_timeout: Annotated[
        float,
        Bounds(ge=0.0, le=86400.0),
        Flag("Seconds that running answers may still take when the service stops", SERVING),
    ] = 20.0
    """Later ones are cut."""
    api_key: Annotated[
        str | None,
        Flag(
            "Require this key [the environment's SECATEUR_API_KEY, else none]. `ps` shows it to every user of this "
            "machine; the environment and --api-key-file are not shown",
            SERVING,
        ),
    ] = None
    api_key_file: Annotated[
        str | None,
        Flag(
            "Require one of the keys in this file, one per line, each with settings if you like: KEY name=team-a "
            "requests-per-minute=60 tokens-per-minute=20000. Changes apply to the next request",
            SERVING,
            metavar="FILE",
        ),
    ] = None
    admin_api_key: Annotated[
        str | None,
        Flag(
            "Serve /admin/drafter, which swaps the draft head or scores one, to who sends this key [the environment's "
            "SECATEUR_ADMIN_API_KEY, else nobody]",
            SERVING,
        ),
    ] = None
    ssl_certfile: Annotated[
        str | None,
        Flag("Speak HTTPS with this certificate (PEM)", SERVING, metavar="FILE", default="plain HTTP"),
    ] = None
    """It may be a chain that begins with the certificate, and needs `ssl_keyfile`."""
    ssl_keyfile: Annotated[
        str | None, Flag("The key of --ssl-certfile (PEM without a password)", SERVING, metavar="FILE")
    ] = None
    batch_dir: Annotated[
        str | None,
        Flag("Serve /v1/files and /v1/batches, and keep them in this folder", SERVING, metavar="DIR", default="none"),
    ] = None
    """An absolute path."""
    allowed_origins: Annotated[
        list[str],
        Flag(
            "Let scripts of pages from this origin use the service, e.g. https://app.example; '*' is all. Write "
            "several with spaces or commas, or as a JSON list",
            SERVING,
            metavar="ORIGIN",
            default="none",
        ),
    ] = []
    allowed_methods: Annotated[list[str], Flag("HTTP methods of such scripts, likewise", SERVING, metavar="METHOD")] = [
        "*"
    ]
    allowed_headers: Annotated[
        list[str], Flag("Request headers of such scripts, likewise", SERVING, metavar="HEADER")
    ] = ["*"]
    allow_credentials: Annotated[bool, Flag("Let browsers send cookies with such requests", SERVING)] = False
    """API keys do not need it."""
    reasoning_parser: Annotated[
        Literal["auto", "none", "think", "openai_gptoss", "gemma4", "seed_oss", "mistral", "granite"],
        Flag(
            "How the model writes reasoning: auto (as its chat template has it), think (<think>...</think>), the name "
            "of a parser of vLLM, or none",
            SERVING,
            metavar="FORMAT",
            default="",
            vllm_values=dict.fromkeys(_THINKING, "think"),
            vllm_names=("reasoning-config", "enable-reasoning"),
        ),
    ] = "auto"
    tool_call_parser: Annotated[
        Literal[
            "auto",
            "hermes",
            "llama3_json",
            "mistral",
            "qwen3_coder",
            "glm45",
            "openai",
            "minimax_m2",
            "granite",
            "gemma4",
            "functiongemma",
            "deepseek_v3",
            "deepseek_v31",
            "kimi_k2",
        ],
        Flag(
            "How the model writes tool calls: auto (as its chat template teaches), or the name of a parser of vLLM",
            SERVING,
            metavar="FORMAT",
            default="",
            vllm_values=_SAME_CALLS,
        ),
    ] = "auto"
    root_path: Annotated[
        str, Flag("The prefix under which clients see the service, e.g. /llm", SERVING, metavar="PATH")
    ] = ""
    enable_tokenizer_info_endpoint: Annotated[
        bool, Flag("Answer /tokenizer_info with the tokenizer's configuration and chat template", SERVING)
    ] = False
    enable_force_include_usage: Annotated[
        bool,
        Flag("Send the usage so far in every chunk of every stream, whatever a request's stream_options say", SERVING),
    ] = False
    stream_interval: Annotated[
        PositiveInt,
        Flag(
            "Tokens after which a stream has its next event, but the first one is sent at once; more events cost the "
            "service more",
            SERVING,
        ),
    ] = 1
    return_tokens_as_token_ids: Annotated[
        bool, Flag("Write the tokens of log probabilities as token_id:123, unless a request says otherwise", SERVING)
    ] = False
    unsupported_content: Annotated[
        Literal["error", "placeholder"],
        Flag(
            "What becomes of images and other parts of messages that are not text, unless a request says otherwise: "
            "error, or placeholder, a text that says so",
            SERVING,
            metavar="KIND",
        ),
    ] = "error"
    disable_additional_properties: Annotated[
        bool,
        Flag("Where a JSON schema says nothing of them, let objects have no properties that it does not name", SERVING),
    ] = True
    """A request may say otherwise."""


class SpeculativeSettings(Settings):
    """The drafting and verification settings of a service: `speculative_config`."""

    method: Method
    """Inferred from `model` when not given: a name with 'eagle3', 'dspark' or 'dflash', then 'eagle-', a folder's
    config.json that describes a block head, else draft_model."""
    model: str | None = None
    """Drafter checkpoint: folder, Hugging Face id or alias such as 'bundled:eagle3'."""
    num_speculative_tokens: Annotated[int, Bounds(gt=0, le=MAX_NODES)] = 16
    """Tree nodes drafted per step, without the root."""
    speculative_tree: Literal["dynamic", "chain", "static"] = "dynamic"
    speculative_token_tree: str | None = None
    speculative_tree_max_depth: Annotated[int, Bounds(ge=1, le=MAX_NODES)] = 8
    speculative_tree_max_children: Annotated[int, Bounds(ge=1, le=MAX_NODES)] = 8
    speculative_tree_prune: TreePrune = "auto"
    """'auto' sets node budgets from calibrated acceptance and measured costs, within any thresholds, and uses
    prompt lookup where it predicts a higher speed than the drafter. A threshold alone implies 'thresholds',
    and a static tree alone 'off'."""
    speculative_tree_prune_min_prob: Annotated[
        Probability,
        Flag(
            "Do not expand a node whose best next token is less probable than this. 0 is off", SPECULATION, metavar="X"
        ),
    ] = 0.0
    speculative_tree_prune_path_prob: Annotated[
        Probability,
        Flag(
            "Do not expand a node whose path from the root is less probable than this. 0 is off",
            SPECULATION,
            metavar="X",
        ),
    ] = 0.0
    """The path's probability is the product of its nodes' draft probabilities."""
    speculative_tree_prune_threshold: Annotated[
        Probability | None, Flag("One number for both thresholds. 0 is off", SPECULATION, metavar="X", default="0")
    ] = None
    acceptance: Acceptance = "coupled"
    rejection_method: Literal["traversal", "recursive"] = "traversal"
    enable_draft_probs: bool = True
    """Under 'rejection': sample children from the draft and verify with its probabilities, else take the top ones."""
    draft_sample_method: Literal["probabilistic", "hybrid", "greedy"] = "probabilistic"
    """'probabilistic' samples every child, 'hybrid' all but the last are the most likely ones, 'greedy' all are."""
    draft_probs_min_temperature: Annotated[float, Bounds(ge=0.0)] = 0.3
    """At lower temperatures 'rejection' takes the most likely children instead of sampling them."""
    draft_tensor_parallel_size: PositiveInt = 1
    draft_placement: Literal["dedicated", "colocated"] | None = None
    """None = dedicated if there are enough devices."""
    draft_link: Literal["auto", "nccl", "host"] = "auto"
    """How messages travel between dedicated GPUs: over NCCL, or through host memory, where NCCL cannot run. 'auto'
    sends features over NCCL, and the rest as timed at start-up; where NCCL does not connect them, all through the host.
    On CPUs it is always 'host'; on a shared GPU NCCL cannot run, and features stay on it unless this is 'host'."""
    draft_fallback: bool = True
    """If the drafter dies, go on without drafts and start another one; False = replace the whole engine."""
    prompt_lookup_max: PositiveInt | None = None
    prompt_lookup_min: PositiveInt | None = None
    max_model_len: PositiveInt | None = None
    """Longest sequence of the drafter, in tokens. The drafter follows every target sequence, so any value but the
    target's own `max_model_len` is an error."""


ALL_THRESHOLDS = "speculative_tree_prune_threshold"
TREE_RULES = tuple(name for name in settings_of(SpeculativeSettings) if name != ALL_THRESHOLDS)
"""The thresholds of the pruning rules. A request may set each as `tree_prune_...`; see `workers.config.TreeRules`."""
