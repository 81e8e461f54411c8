"""Wrong and foreign command lines: each gets one sentence that says what to write, at once and with exit code 2."""

import shlex
import subprocess
import sys
import types
from pathlib import Path

import pytest

from secateur import cli
from secateur.vllm_names import COMMANDS

ROOT = Path(__file__).parents[2]

WRONG = [
    # commands
    ("serv", "there is no command 'serv' (did you mean 'serve'?)"),
    ("frobnicate", "there is no command 'frobnicate' (valid: "),
    ("meta-llama/Llama-3.1-8B", "to serve that model, write `secateur serve meta-llama/Llama-3.1-8B`"),
    ("batch rn", "there is no command 'rn' (did you mean 'run'?)"),
    ("bench latency", "`python -m bench.speed` measures that"),
    ("bench speeed", "there is no command 'speeed'"),
    ("--port 80 serve", "--port: only --version and --help stand before a command"),
    ("-v", "-v: only --version and --help stand before a command"),
    # what is missing, or one too many
    ("complete", "prompt is missing; write `secateur complete PROMPT`"),
    ("batch run", "IN.jsonl is missing; write `secateur batch run IN.jsonl`"),
    ("batch run in.jsonl", "--output is missing; write `secateur batch run ... --output OUT.jsonl`"),
    ("serve --max-num-seqs", "--max-num-seqs: a value is missing"),
    ("serve --model", "--model: a value is missing"),
    ("serve org/a org/b", "org/b: more arguments than the command takes; remove it"),
    ("complete write a poem", "a poem: more arguments than the command takes; remove it, or quote a text"),
    # misspelt options
    ("serve --prot 1", "there is no option --prot (did you mean --port?)"),
    ("serve --max-modle-len 5", "there is no option --max-modle-len (did you mean --max-model-len?)"),
    ("complete a --temprature 1", "(did you mean --temperature?)"),
    ("chat --url http://localhost:8000", "there is no option --url (did you mean --base-url?)"),
    ("serve --method eagle3", "--method is a key of the drafter: write --speculative-config.method"),
    ("serve --speculative-tree-prune auto", "write --speculative-config.speculative-tree-prune"),
    # values
    ("serve --port eighty", "--port: must be a valid integer (got 'eighty')"),
    ("serve --port 70000", "port: must be less than or equal to 65535 (got 70000)"),
    ("serve --port -1", "port: must be greater than or equal to 0 (got -1)"),
    ("serve -tp -2", "tensor_parallel_size: must be greater than or equal to 1 (got -2)"),
    ("serve --max-model-len 32kk", "max_model_len: must be a whole number such as 4096, 32k"),
    ("serve --gpu-memory-utilization 90", "gpu_memory_utilization: must be less than or equal to 1 (got 90.0)"),
    ("serve --dtype bf16", "--dtype: 'bf16' is not one of 'auto', 'float32', 'bfloat16'"),
    ("serve --device cuda:0", "--device: 'cuda:0' is not one of 'auto', 'cpu', 'cuda'"),
    ("serve --served-model-name ''", "served_model_name: is empty; write a name, or leave it out"),
    ("serve --reasoning-parser foo", "reasoning_parser: must be 'auto', 'none', 'think', 'openai_gptoss', 'gemma4', "),
    ("complete a --top-p 2", "top_p: must be less than or equal to 1 (got 2.0)"),
    ("complete a --max-tokens -3", "max_tokens: must be greater than or equal to 0 (got -3)"),
    ("complete a --base-url localhost:8000", "base_url: must begin with http:// or https://"),
    ("batch run a.jsonl -o b.jsonl --timeout -1", "--timeout: must be greater than or equal to 0 (got '-1')"),
    ("plan --hardware h1000", "'h1000' is not known (did you mean 'h100'?)"),
    ("top --interval 0", "--interval: must be greater than or equal to 0.1 (got '0')"),
    ("completion tcsh", "'tcsh' is not one of 'bash', 'zsh', 'fish'"),
    # files and models
    ("serve /nowhere/model", "no model at /nowhere/model; give an existing folder or a Hugging Face id"),
    ("serve models/of/mine", "no model at models/of/mine; give an existing folder, or a Hugging Face id such as org/"),
    ("serve nowhere.gguf", "no model at nowhere.gguf"),
    ("serve smollm", "(did you mean 'smollm2'?)"),
    ("serve bundled:targt", "(did you mean 'bundled:target'?)"),
    ("serve --config /nowhere.yaml", "cannot read /nowhere.yaml: No such file"),
    ("serve --ssl-certfile /nowhere", "ssl_keyfile: is missing; name the file"),
    ("batch run /nowhere.jsonl -o o.jsonl", "cannot read /nowhere.jsonl: No such file"),
    # drafters
    ("serve -sc eagle3", """speculative_config: not JSON (Expecting value: line 1 column 1 (char 0)); write it in"""),
    ("serve -sc '{method: eagle3}'", """write it in single quotes, as in '{"method": "ngram"}'"""),
    ("serve -sc '[1]'", "speculative_config: must be a JSON object, as in"),
    ("serve -sc '{}'", "speculative_config: has no keys. Give 'model'"),
    ("""serve -sc '{"method": "eagel3", "model": "o/x"}'""", "no method 'eagel3' (did you mean 'eagle3'?)"),
    ("""serve -sc '{"method": "EAGLE3", "model": "o/x"}'""", "no method 'EAGLE3' (did you mean 'eagle3'?)"),
    ("""serve -sc '{"method": "p_eagle", "model": "o/x"}'""", "write 'eagle3', which reads P-EAGLE heads too"),
    ("""serve -sc '{"method": "suffix"}'""", "write 'ngram', which drafts from the prompt and the answer"),
    ("""serve -sc '{"method": "medusa", "model": "o/x"}'""", "write 'eagle3' with an EAGLE-3 head, or 'draft_model'"),
    ("""serve -sc '{"method": "eagle3"}'""", "method 'eagle3' needs a model; give the drafter's folder or id"),
    ("""serve -sc '{"model": 3}'""", "speculative_config.model: must be the drafter's folder or id"),
    ("""serve -sc '{"model": "o/x", "num_speculative_tokens": -3}'""", "must be greater than 0 (got -3)"),
    ("""serve -sc '{"model": "o/x", "num_spec_tokens": 3}'""", "(did you mean 'num_speculative_tokens'?)"),
    # contradictions
    ("""serve -sc '{"model": "o/x"}' --no-speculation""", "contradicts speculative_config; keep one of the two"),
    ("complete a --base-url http://there -tp 2", "--tensor-parallel-size: for a service started here"),
    ("bench serve --concurrency 1 --request-rate 1", "give one of them"),
    ("plan --context 5", "--context: belongs to a prediction; add --hardware NAME"),
]

SERVED = [
    "serve meta-llama/Llama-3.1-8B-Instruct --tensor-parallel-size 2 --max-model-len 8192 --gpu-memory-utilization 0.9 "
    "--enable-prefix-caching --dtype half --seed 42",
    'serve meta-llama/Llama-3.1-8B-Instruct --speculative-config \'{"method": "eagle3", "model": '
    '"yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 1}\'',
    "serve Qwen/Qwen3-8B --reasoning-parser qwen3 --enable-auto-tool-choice --tool-call-parser hermes",
    "serve --model Qwen/Qwen3-8B --max_model_len 32K --served-model-name qwen qwen3 --generation-config vllm",
    "serve openai/gpt-oss-20b --no-enable-prefix-caching --max-num-batched-tokens 8k --enable-chunked-prefill",
    "serve deepseek-ai/DeepSeek-R1 -tp 8 --kv-cache-dtype fp8_e4m3 --disable-log-requests "
    "--speculative-config.method deepseek_mtp --speculative-config.num_speculative_tokens 1",
]
"""Lines of vLLM's documentation that mean the same here."""

FOREIGN = [
    ("serve Qwen/Qwen3-8B --enable-reasoning --reasoning-parser deepseek_r1", {"enable-reasoning": "--reasoning-p"}),
    (
        "serve Qwen/Qwen3-30B-A3B --enable-expert-parallel -tp 2 --async-scheduling -O3 --served-model-name a b",
        {"enable-expert-parallel": "--tensor-parallel-size", "async-scheduling": "leave it out", "-O3": "leave it out"},
    ),
    ("serve Qwen/Qwen3-8B --rope-scaling '{\"factor\": 4.0}'", {"rope-scaling": "edit config.json in a copy"}),
    (
        "serve openai/gpt-oss-20b --max-cudagraph-capture-size 2048 --num-scheduler-steps 8",
        {"max-cudagraph-capture-size": "leave it out", "num-scheduler-steps": "leave it out"},
    ),
    ("serve deepseek-ai/DeepSeek-V3 -tp 8 --trust-remote-code", {"trust-remote-code": "leave it out"}),
    ("serve deepseek-ai/DeepSeek-R1 -tp 8 -dp 2 -ep", {"-dp": "num_replicas", "-ep": "--tensor-parallel-size"}),
    (
        "serve meta-llama/Llama-3.1-70B-Instruct --quantization awq --swap-space 4 --pipeline-parallel-size 2",
        {"quantization": "leave it out", "swap-space": "leave it out", "pipeline-parallel-size": "--tensor-parallel"},
    ),
    (
        "serve x/y --speculative-model o/z --num-speculative-tokens 5 --use-v2-block-manager",
        {"speculative-model": "write model in", "num-speculative-tokens": "write num_", "use-v2": ""},
    ),
    ("serve x/y --block-size 16 --max-log-len 100", {"block-size": "write --page-size", "max-log-len": "leave it out"}),
    ("serve x/y --enable-lora --lora-modules a=b", {"enable-lora": "merge the adapter", "lora-modules": "merge the"}),
    ("serve x/y --limit-mm-per-prompt '{\"image\": 1}'", {"limit-mm-per-prompt": "leave it out"}),
    (
        "serve x/y --compilation-config '{\"mode\": 3}' --attention-backend FLASHINFER --calculate-kv-scales",
        {"compilation-config": "leave it out", "attention-backend": "--kernels", "calculate-kv-scales": "leave it out"},
    ),
    (
        "serve x/y --chat-template ./t.jinja --max-logprobs 10 --load-format safetensors --download-dir /d",
        {"chat-template": "into the model's folder", "max-logprobs": "", "load-format": "", "download-dir": "HF_HOME"},
    ),
    ("serve x/y --swap-space 1 --headless", {"swap-space": "leave it out", "headless": "RAY_ADDRESS"}),
    ("serve x/y --disable-custom-all-reduce --enable-eplb", {"disable-custom": "", "enable-eplb": "-parallel"}),
    ("serve x/y --structured-outputs-config.backend xgrammar", {"structured-outputs-config": "leave it out"}),
    # SGLang
    (
        "serve --model-path x/y --tp-size 2 --mem-fraction-static 0.8 --context-length 8192 --port 30000",
        {
            "model-path": "`secateur serve MODEL`",
            "tp-size": "--tensor-parallel-size",
            "mem-fraction-static": "--gpu-memory-utilization",
            "context-length": "--max-model-len",
        },
    ),
    (
        "serve --model x/y --tp 2 --dp-size 2 --ep-size 2 --chunked-prefill-size 4096 --disable-radix-cache",
        {
            "tp": "--tensor-parallel-size",
            "dp-size": "num_replicas",
            "ep-size": "--tensor-parallel-size",
            "chunked-prefill-size": "--max-num-batched-tokens",
            "disable-radix-cache": "--no-enable-prefix-caching",
        },
    ),
    (
        "serve --model x/y --speculative-algorithm EAGLE3 --speculative-draft-model-path o/z --speculative-num-steps 5 "
        "--speculative-eagle-topk 8 --speculative-num-draft-tokens 32",
        {
            "speculative-algorithm": "write method in",
            "speculative-draft-model-path": "write model in",
            "speculative-num-steps": "write speculative_tree_max_depth in",
            "speculative-eagle-topk": "write speculative_tree_max_children in",
            "speculative-num-draft-tokens": "write num_speculative_tokens in",
        },
    ),
    (
        "serve --model x/y --max-running-requests 64 --schedule-policy lpm --random-seed 3 --disable-cuda-graph",
        {"max-running-requests": "--max-num-seqs", "schedule-policy": "--scheduling-p", "random-seed": "--seed",
         "disable-cuda-graph": "--enforce-eager"},
    ),
]  # fmt: skip
"""Lines with options that Secateur does not have, and a part of what is said of each of these options."""


@pytest.fixture(autouse=True)
def _alone(monkeypatch, tmp_path):
    """Nothing is served, and neither torch nor Ray can be imported."""
    for name in ("torch", "ray", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)
    launch = types.ModuleType("cluster.serve.launch")
    launch.serve = lambda args: print(f"served {args.model}")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cluster.serve.launch", launch)
    monkeypatch.setattr("secateur.cli.serving.find_spec", lambda name: None)
    monkeypatch.delenv("SECATEUR_API_KEY", raising=False)
    monkeypatch.chdir(tmp_path)


def said(line: str, capsys) -> list[str]:
    """Return the lines of the error, without the one that points to the help."""
    assert cli.main(shlex.split(line)) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and "Traceback" not in shown.err
    _, _, text = shown.err.partition("secateur: error: ")
    return [told for told in text.splitlines() if not told.startswith("See `secateur")]


@pytest.mark.parametrize(("line", "says"), WRONG)
def test_a_wrong_line_is_one_sentence(line, says, capsys):
    [sentence] = said(line, capsys)
    assert says in sentence


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("line", SERVED)
def test_a_line_of_vllm_that_means_the_same_is_served(line, capsys):
    assert cli.main([*shlex.split(line), "--port", "0"]) == 0
    assert capsys.readouterr().out.startswith("served ")


@pytest.mark.parametrize(("line", "instead"), FOREIGN)
def test_each_foreign_option_gets_a_line_that_says_what_to_write(line, instead, capsys):
    lines = said(line, capsys)
    assert len(lines) == len(instead)
    for (option, says), told in zip(instead.items(), lines, strict=True):
        assert told.startswith(option if option.startswith("-") else f"--{option}") and says in told
        assert any(word in told for word in ("write ", "leave it out", "set ", "merge ", "edit ", "start "))


def test_all_problems_of_a_line_are_in_one_error(capsys):
    lines = said("serve x/y --block-size 16 --prot 1 --tp 2 --method eagle3", capsys)
    assert [line.split()[0] for line in lines] == ["--block-size", "there", "--tp", "--method"]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_of_another_project_names_ours(name, capsys):
    [sentence] = said(name, capsys)
    assert "write `secateur " in sentence


def test_a_command_alone_shows_its_help(capsys):
    for line in ("", "batch", "bench"):
        assert cli.main(line.split()) == 2
        shown = capsys.readouterr().err
        assert shown.startswith("Usage: secateur") and "error" not in shown


REAL = ["serv", "serve --prot 1", "serve /nowhere/model", "serve -sc eagle3", "complete a --top-p 2", "serve x/y -dp 2"]


@pytest.mark.parametrize("line", REAL)
def test_a_real_process_says_the_same(line):
    code = "import sys; from secateur.cli import main; code = main(sys.argv[1:]); print(*sys.modules); sys.exit(code)"
    command = [sys.executable, "-c", code, *shlex.split(line)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.startswith("secateur: error: ") and "Traceback" not in done.stderr
    assert {"torch", "ray", "transformers"}.isdisjoint(done.stdout.split())
