# /// script
# dependencies = ["guidellm==0.8.1", "torch==2.13.0"]
# ///
"""guidellm: its benchmark with synthetic text over chats, completions and responses, and with prompts of a file."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAM = Path(sys.executable).parent / "guidellm"
NUM_REQUESTS, NUM_TOKENS = 6, 16


def measured(folder: Path, request_format: str, data: str) -> dict:
    """Return the only benchmark of guidellm's report."""
    report = folder / "report.json"
    backend = f"kind=openai_http,target={os.environ['SECATEUR_URL']},request_format={request_format}"
    argv = [str(PROGRAM), "run", "--backend", backend, "--data", data, "--disable-progress"]
    argv += ["--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={NUM_REQUESTS}"]
    argv += ["--tokenizer", f"kind=huggingface_auto,model={os.environ['SECATEUR_MODEL']}"]
    subprocess.run([*argv, "--output", f"kind=json,path={report}"], check=True)
    [benchmark] = json.loads(report.read_text())["benchmarks"]
    return benchmark


def check(benchmark: dict, *, num_prompt_tokens: int, may_end: bool = False) -> None:
    """Compare what guidellm counted with what it asked for. may_end: without `ignore_eos`, answers may be shorter."""
    assert benchmark["metrics"]["request_totals"]["successful"] == NUM_REQUESTS
    assert benchmark["metrics"]["request_totals"]["errored"] == 0
    for request in benchmark["requests"]["successful"]:
        num_tokens = request["output_metrics"]["text_tokens"]
        assert request["output"] and (num_tokens == NUM_TOKENS or (may_end and num_tokens < NUM_TOKENS))
        # Words do not always have exactly as many tokens as guidellm meant, and a chat's template has some.
        assert abs(request["input_metrics"]["text_tokens"] - num_prompt_tokens) < 24


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        synthetic = f"kind=synthetic_text,prompt_tokens=64,output_tokens={NUM_TOKENS}"
        for request_format in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
            benchmark = measured(folder, request_format, synthetic)
            check(benchmark, num_prompt_tokens=64, may_end=request_format == "/v1/responses")
        rows = [{"prompt": f"def add_{n}(x):", "output_tokens_count": NUM_TOKENS} for n in range(NUM_REQUESTS)]
        (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        own = f"kind=json_file,path={folder / 'prompts.jsonl'}"
        check(measured(folder, "/v1/completions", own), num_prompt_tokens=10)


main()
