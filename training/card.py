"""Evaluate the bundled models and write their MODEL_CARD.md."""

from __future__ import annotations

import json
from pathlib import Path

from training.evaluate import evaluate

REPOSITORY = Path(__file__).resolve().parent.parent
CARD = """\
# The bundled models

Three small models that belong together: a **target**, an **EAGLE-3 head** for it and an independent **draft**. They
exist so that every path of Secateur runs anywhere, with real and imperfect agreement between draft and target.
They are not useful language models: they write Python-looking text with little sense in it.

| folder | parameters | file (bf16) | held-out loss, code | top-1, code | loss, chat | top-1, chat |
|---|---|---|---|---|---|---|
{model_rows}

- **target**: `LlamaForCausalLM`, 8 layers, hidden 192, 8 heads and 4 key-value heads of 32 (so heads x head_dim = 256
  is not the hidden size, on purpose), intermediate 512, tied embeddings, 2048 positions.
- **eagle3**: one layer of the same shape in the SafeAILab layout (`fc`, `midlayer.*`, `norm`, `lm_head`, `d2t`,
  `t2d`), draft vocabulary 1536; features are the residual stream before the target's layers 2, 4 and 5. It has no
  embeddings of its own: it reads the target's.
- **draft**: `LlamaForCausalLM`, 3 layers, hidden 64, 4 heads and 4 key-value heads of 16, the target's tokenizer.
- **tokenizer**: byte-level BPE, 2048 ids, {chars_per_token} characters per token; `<|endoftext|>` 0, `<|im_start|>` 1,
  `<|im_end|>` 2, `<|pad|>` 3; ChatML template; generation ends at 0 or 2.

Losses are in nats per token on files never trained on. Weights are stored in bf16; all numbers here are of the stored
weights computed in fp32.

## Agreement with the target

Chains of depth 5, drafted from every fourth position of {num_texts} texts. *Agreement* is how often the
draft's favourite token is the target's, at step 1 to 5, the earlier ones forced to the text; *top-4* how often the
target's favourite is among the draft's four best; *overlap* is sum min(p, q) at step 1, the chance that one sampled
token is accepted.

| drafter | text | agreement at steps 1-5 | top-4 at steps 1-5 | overlap T=1 | T=0.7 |
|---|---|---|---|---|---|
{agreement_rows}

On text the target writes greedily, the mean number of drafted tokens accepted per step (of 5, without the bonus token):

| drafter | greedy chain of 5 | full 4-ary tree of depth 5 |
|---|---|---|
{accepted_rows}

The head was run token by token with a key-value cache; its logits differ from the training-time unroll by at most
{max_difference:.1e}. Of the held-out chat prompts of `secateur/bundled/prompts.jsonl`, {chats_ended:.0%} of the greedy
answers end by themselves within 160 tokens.

## What it writes

Greedy, from held-out prompts:

{samples}

## Data, licences, attribution

{num_tokens:,} training tokens of Python source from {num_files:,} files, of which {num_held_out} were held out by a
hash of their path, and {num_chat_tokens:,} tokens of ChatML conversations made from the same files' functions and
docstrings.
Identical files count once; tests, vendored and generated files are left out, and leading licence comments are
stripped. Sizes are those read:

| source | licence | copyright | MB of text |
|---|---|---|---|
{source_rows}

The Python standard library is Copyright (c) 2001 Python Software Foundation; All Rights Reserved, under the PSF License
Agreement. The weights are derived from these texts and are offered under the licence of this repository; whoever
redistributes text that the models reproduce should keep the notices above.

## How they were made

`training/train.py`, see `training/README.md`. Time-budgeted training is not reproducible bit by bit.

| model | steps | tokens | seconds | device | torch |
|---|---|---|---|---|---|
{training_rows}

## Limits

- English and Python only; no factual knowledge, no instruction following beyond the shape of an answer.
- They reproduce common idioms of their sources, and may reproduce short pieces of them verbatim.
- Greedy text repeats itself, which flatters the acceptance numbers above; held-out text is the honest column.
- Trained on windows of up to 2048 tokens, mostly far shorter; no use beyond that.
- The head and the draft are tied to exactly this target: retrain all three together.
"""


def table_row(*cells: object) -> str:
    """Return a Markdown table row."""
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def joined(values: list[float]) -> str:
    """Join numbers with a common format."""
    return " ".join(f"{value:.3f}".lstrip("0") if value < 1 else "1.00" for value in values)


def model_rows(metrics: dict, models: Path) -> list[str]:
    """Return the table of models."""
    rows = []
    for name in ("target", "eagle3", "draft"):
        quality = metrics["evaluation"].get(name)
        cells = [quality[k][m] for k in ("code", "chat") for m in ("loss", "top1")] if quality else ["-"] * 4
        size = (models / name / "model.safetensors").stat().st_size / 1e6
        num_parameters = metrics["training"][name]["num_parameters"]
        rows.append(table_row(f"`{name}`", f"{num_parameters:,}", f"{size:.2f} MB", *cells))
    return rows


def agreement_rows(evaluation: dict) -> list[str]:
    """Return the table of agreement between drafts and target."""
    kinds = {"held_out": "held-out code", "target_greedy": "its own, greedy", "target_sampled": "its own, T=1"}
    return [
        table_row(name, kinds[kind], joined(s["agreement_per_step"]), joined(s["top4_per_step"]),
                  s["overlap_per_step_t1"][0], s["overlap_per_step_t07"][0])
        for name in ("head", "draft") for kind, s in evaluation[f"{name}_vs_target"].items()
    ]  # fmt: skip


def accepted_rows(evaluation: dict) -> list[str]:
    """Return the table of accepted tokens."""
    summaries = {name: evaluation[f"{name}_vs_target"]["target_greedy"] for name in ("head", "draft")}
    return [table_row(n, s["mean_accepted_chain5"], s["mean_accepted_tree4x5"]) for n, s in summaries.items()]


def sample_blocks(samples: list[dict]) -> list[str]:
    """Return the sample texts as Markdown blocks."""
    return [f"````text\n{s['prompt'].rstrip()}\n>>>\n{s['answer'].rstrip()}\n````" for s in samples]


def render_card(metrics: dict, models: Path, num_texts: int) -> str:
    """Return the model card as Markdown."""
    corpus, evaluation, training = metrics["corpus"], metrics["evaluation"], metrics["training"]
    fields = ("num_steps", "num_tokens", "seconds", "device", "torch")
    sources = [
        table_row(s["folder"] or "Python 3.11 stdlib", s["licence"], s["holder"], f"{s['num_chars'] / 1e6:.1f}")
        for s in corpus["sources"]
    ]
    return CARD.format(
        model_rows="\n".join(model_rows(metrics, models)),
        chars_per_token=corpus["chars_per_token"],
        num_texts=num_texts,
        agreement_rows="\n".join(agreement_rows(evaluation)),
        accepted_rows="\n".join(accepted_rows(evaluation)),
        max_difference=evaluation["max_logit_difference_decoder_unroll"],
        chats_ended=evaluation["chats_ended"],
        samples="\n\n".join(sample_blocks(evaluation["samples"])),
        num_tokens=corpus["num_tokens"]["train"],
        num_files=corpus["num_files"],
        num_held_out=corpus["num_held_out_files"],
        num_chat_tokens=corpus["num_tokens"]["chat"],
        source_rows="\n".join(sources),
        training_rows="\n".join(table_row(name, *(training[name][f] for f in fields)) for name in training),
    )


def head_record(metrics: dict) -> dict:
    """Return the head's `training.json`, as `training.head` writes it: what it measured on held-out text."""
    held_out = metrics["evaluation"]["head_vs_target"]["held_out"]
    entry = {
        "tokens": metrics["training"]["eagle3"]["num_tokens"],
        "agreement": held_out["agreement_per_step"],
        "acceptance": held_out["overlap_per_step_t1"],
    }
    return {"log": [entry]}


def write_card(data: Path, models: Path, num_texts: int = 16) -> None:
    """Evaluate `models`, add the result to its metrics.json and write its MODEL_CARD.md."""
    file = models / "metrics.json"
    metrics = json.loads(file.read_text())
    metrics["evaluation"] = evaluate(data, models, REPOSITORY / "secateur" / "bundled" / "prompts.jsonl")
    file.write_text(json.dumps(metrics, indent=2) + "\n")
    (models / "MODEL_CARD.md").write_text(render_card(metrics, models, num_texts))
    (models / "eagle3" / "training.json").write_text(json.dumps(head_record(metrics), indent=1) + "\n")
