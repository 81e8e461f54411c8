# /// script
# dependencies = ["lm_eval[api]==0.4.13", "transformers==5.23.0"]
# ///
"""lm-eval: multiple choice, perplexity and generation through `local-completions`, with the tokenizer of the service
and with a local one. Log-likelihoods equal those of transformers in float32 within 1e-3."""

import heapq
import inspect
import json
import os
import subprocess
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.tasks import TaskManager

MODEL, URL = os.environ["SECATEUR_MODEL"], f"{os.environ['SECATEUR_URL']}/v1/completions"
REFERENCE = Path(__file__).parent.parent / "reference.py"
TOLERANCE = 1e-3
VERBS = ("add", "subtract", "multiply", "divide")
SIGNS = ("+", "-", "*", "/")
QUESTIONS = [
    {
        "question": f"def {VERBS[n % 4]}_{n}(x):\n    return x",
        "choices": [f" {sign} {n}" for sign in SIGNS],
        "answer": n % 4,
    }
    for n in range(49)
]
QUESTIONS.append(
    {"question": "class Point:\n    def __init__(", "choices": ["self", "def", "import", "("], "answer": 0}
)
TEXTS = [
    inspect.getsource(textwrap.fill),
    inspect.getsource(textwrap.dedent),
    inspect.getsource(heapq)[:8000],  # more tokens than the context of the bundled model
]
TASKS = {
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    },
    "perplexity": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "generation": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 16, "temperature": 0},
        "metric_list": [{"metric": "exact_match"}],
    },
}
DOCUMENTS = {"choice": QUESTIONS, "perplexity": [{"text": text} for text in TEXTS], "generation": QUESTIONS[::5]}


ON_SERVICE = {"model": "secateur", "base_url": URL, "num_concurrent": 4}


class Transformers(LocalCompletionsAPI):
    """Answers lm-eval's requests for log-likelihoods by transformers instead of the service."""

    def _loglikelihood_tokens(self, requests, **kwargs):
        rows = json.dumps([(context, continuation) for _, context, continuation in requests])
        argv = [os.environ["SECATEUR_PYTHON"], str(REFERENCE), MODEL]
        done = subprocess.run(argv, input=rows, stdout=subprocess.PIPE, text=True, check=True)
        return [tuple(answer) for answer in json.loads(done.stdout)]


def write_tasks(folder: Path) -> None:
    for task, options in TASKS.items():
        rows = folder / f"{task}.jsonl"
        rows.write_text("".join(json.dumps(row) + "\n" for row in DOCUMENTS[task]))
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(rows)}}, "test_split": "test"}
        (folder / f"{task}.yaml").write_text(json.dumps({"task": task, **data, **options}))  # JSON is YAML


def answers(tasks: TaskManager, *names: str, **asked: Any) -> dict[str, list[Any]]:
    """Return what was answered to each request of the tasks `names`."""
    found = lm_eval.simple_evaluate(tasks=list(names), task_manager=tasks, log_samples=True, bootstrap_iters=0, **asked)
    return {
        task: [answer for sample in samples for [answer] in sample["resps"]]
        for task, samples in found["samples"].items()
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_tasks(Path(folder))
        tasks = TaskManager(include_path=folder, include_defaults=False)
        local = {"tokenizer": MODEL, "tokenizer_backend": "huggingface"}
        expected = answers(tasks, "choice", "perplexity", model=Transformers(**ON_SERVICE, **local))
        remote = answers(tasks, *TASKS, model="local-completions", model_args=ON_SERVICE)
        as_texts = {**ON_SERVICE, **local, "tokenized_requests": False, "batch_size": 8}
        local = answers(tasks, "choice", "generation", model="local-completions", model_args=as_texts)
    assert (len(expected["choice"]), len(expected["perplexity"])) == (200, 3)
    assert {is_greedy for _, is_greedy in expected["choice"]} == {True, False}
    for found in (remote["choice"], local["choice"]):
        worst = max(abs(score - right) for (score, _), (right, _) in zip(found, expected["choice"], strict=True))
        print(f"200 log-likelihoods differ from those of transformers by at most {worst:.1e}")
        assert worst < TOLERANCE
        assert [is_greedy for _, is_greedy in found] == [is_greedy for _, is_greedy in expected["choice"]]
    for score, right in zip(remote["perplexity"], expected["perplexity"], strict=True):
        print(f"log-likelihood of a text: {score:.4f}, by transformers {right:.4f}")
        assert abs(score - right) < TOLERANCE * max(1.0, abs(right) / 100)  # a text's is a sum of thousands
    assert remote["generation"] == local["generation"] and any(remote["generation"])
    assert not any("\n" in text for text in remote["generation"])


main()
