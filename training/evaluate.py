"""Evaluates the saved models on held-out text: losses, agreement of draft and head with the target, drafted chains.

The head runs as in an engine, token by token with a KV cache, independently of `eagle3.py`; `check_against_unroll`
compares the two.
Letters as in `eagle3.py`: S steps, H hidden, D draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM

from training.data import Corpus, TokenStream, load_corpus
from training.eagle3 import TargetView, TrainableEagle3Head, view_target
from training.language_model import continue_greedily_or_sample, load_model, next_token_loss

NUM_STEPS = 5
TOP_K = 4
NUM_TEXTS = 16
TEXT_LENGTH = 192
PROMPT_LENGTH = 64
START_EVERY = 4
MAX_ANSWER_TOKENS = 160
IM_END = 2


class Node(NamedTuple):
    """One drafted position: the pre-norm output that the next step reads, and the cache including this position."""

    hidden_H: Tensor
    keys: Tensor  # [num_cached, kv_heads, head_dim]
    values: Tensor


class HeadDecoder:
    """EAGLE-3 inference for one sequence."""

    def __init__(self, folder: Path, embeddings_VH: Tensor):
        self.config = json.loads((folder / "config.json").read_text())
        tensors = load_file(folder / "model.safetensors")
        self.weights = {name: t.float() if t.is_floating_point() else t for name, t in tensors.items()}
        self.embeddings_VH = embeddings_VH
        self.draft_ids = self.weights["d2t"] + torch.arange(len(self.weights["d2t"]))

    def norm(self, x: Tensor, name: str) -> Tensor:
        """Apply the RMS norm called `name`."""
        variance = x.pow(2).mean(-1, keepdim=True)
        return x * torch.rsqrt(variance + self.config["rms_norm_eps"]) * self.weights[f"{name}.weight"]

    def project(self, x: Tensor, name: str) -> Tensor:
        """Multiply by the middle layer's matrix called `name`."""
        return self.weights[f"midlayer.{name}.weight"] @ x

    def rotate(self, x: Tensor, position: int) -> Tensor:
        """Rotate x [heads, head_dim] to `position`: pairs (j, j + head_dim / 2) as complex numbers."""
        half = x.shape[-1] // 2
        angles = position * self.config["rope_theta"] ** (-torch.arange(half) / half)
        turned = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones(half), angles)
        return torch.cat([turned.real, turned.imag], -1)

    def step(self, token: int, feature_H: Tensor, position: int, parent: Node | None) -> Node:
        """Read `token` with a feature (fused, or the parent's hidden) at `position`, after the parent's cache."""
        dim, num_kv = self.config["head_dim"], self.config["num_key_value_heads"]
        x = torch.cat([self.norm(self.embeddings_VH[token], "midlayer.input_layernorm"),
                       self.norm(feature_H, "midlayer.hidden_norm")])  # fmt: skip
        query = self.rotate(self.project(x, "self_attn.q_proj").view(-1, dim), position)
        key = self.rotate(self.project(x, "self_attn.k_proj").view(-1, dim), position)[None]
        value = self.project(x, "self_attn.v_proj").view(1, -1, dim)
        keys = key if parent is None else torch.cat([parent.keys, key])
        values = value if parent is None else torch.cat([parent.values, value])
        grouped = query.view(num_kv, -1, dim)  # query head h reads key head h // group
        weights = torch.einsum("ghd,ngd->ghn", grouped, keys).div(math.sqrt(dim)).softmax(-1)
        mixed = torch.einsum("ghn,ngd->ghd", weights, values).flatten()
        residual = feature_H + self.project(mixed, "self_attn.o_proj")
        y = self.norm(residual, "midlayer.post_attention_layernorm")
        gated = F.silu(self.project(y, "mlp.gate_proj")) * self.project(y, "mlp.up_proj")
        return Node(residual + self.project(gated, "mlp.down_proj"), keys, values)

    def logits(self, node: Node) -> Tensor:
        """Return logits [V] over the target's vocabulary, -inf outside the draft vocabulary."""
        full = torch.full((self.config["vocab_size"],), -torch.inf)
        full[self.draft_ids] = self.weights["lm_head.weight"] @ self.norm(node.hidden_H, "norm")
        return full

    def draft_along(self, tokens: list[int], features_TF: Tensor, starts: list[int], num_steps: int) -> Tensor:
        """Return logits [num_starts, S, V] of chains drafted from `starts` and forced along `tokens`.

        features_TF: target features [num_tokens, 3H]. Start i has features up to i and token i + 1.
        """
        extended: list[Node] = []
        for i in range(max(starts) + 1):
            fused = self.weights["fc.weight"] @ features_TF[i]
            extended.append(self.step(tokens[i + 1], fused, i, extended[-1] if extended else None))
        chains = []
        for start in starts:
            chain = [extended[start]]
            for s in range(1, num_steps):
                chain.append(self.step(tokens[start + 1 + s], chain[-1].hidden_H, start + s, chain[-1]))
            chains.append(torch.stack([self.logits(node) for node in chain]))
        return torch.stack(chains)


def load_head(folder: Path, target: LlamaForCausalLM) -> TrainableEagle3Head:
    """Load the saved weights into a training-time head."""
    tensors = load_file(folder / "model.safetensors")
    head = TrainableEagle3Head(target.config, tensors["d2t"] + torch.arange(len(tensors["d2t"])))
    head.load_state_dict(tensors)
    return head.eval()


def check_against_unroll(decoder: HeadDecoder, head: TrainableEagle3Head, view: TargetView, tokens_T: Tensor) -> float:
    """Return the largest |difference| of logits between the training unroll and the decoder on a text of T tokens."""
    steps = head.unroll(view.features_BTF, view.embeds_BTH, view.logits_BTV, NUM_STEPS)
    starts = [0, 1, 7, steps[0].logits_BTD.shape[1] - 1]
    drafted = decoder.draft_along(tokens_T.tolist(), view.features_BTF[0], starts, NUM_STEPS)
    unrolled = torch.stack([step.logits_BTD[0, starts] for step in steps], dim=1)
    return (drafted[..., decoder.draft_ids] - unrolled).abs().max().item()


class Comparison(NamedTuple):
    """Drafted and true logits at the same positions: each [num_starts, S, V]."""

    drafted: Tensor
    target: Tensor

    def agreement(self) -> list[float]:
        """Return for each step how often the most likely tokens agree."""
        return rounded((self.drafted.argmax(-1) == self.target.argmax(-1)).float().mean(0))

    def is_in_top_k(self) -> Tensor:
        """Return where the target's most likely token is among the drafter's `TOP_K` most likely."""
        return (self.drafted.topk(TOP_K).indices == self.target.argmax(-1, keepdim=True)).any(-1)

    def overlap(self, temperature: float) -> list[float]:
        """Return for each step sum min(p, q), the probability that one sampled token is accepted."""
        p, q = (self.target / temperature).softmax(-1), (self.drafted / temperature).softmax(-1)
        return rounded(torch.minimum(p, q).sum(-1).mean(0))

    def mean_accepted(self) -> float:
        """Return the mean accepted length of a greedy chain; valid only for the target's greedy text."""
        hits = (self.drafted.argmax(-1) == self.target.argmax(-1)).int()
        return round(hits.cumprod(1).sum(1).float().mean().item(), 3)

    def mean_accepted_tree(self) -> float:
        """Return the same for the full tree with the `TOP_K` most likely children of each node."""
        return round(self.is_in_top_k().int().cumprod(1).sum(1).float().mean().item(), 3)

    def summary(self) -> dict:
        """Return all figures, for metrics.json."""
        return {
            "agreement_per_step": self.agreement(),
            "top4_per_step": rounded(self.is_in_top_k().float().mean(0)),
            "overlap_per_step_t1": self.overlap(1.0),
            "overlap_per_step_t07": self.overlap(0.7),
            "mean_accepted_chain5": self.mean_accepted(),
            "mean_accepted_tree4x5": self.mean_accepted_tree(),
        }


def rounded(values: Tensor) -> list[float]:
    """Return rounded values as a list."""
    return [round(value, 3) for value in values.tolist()]


def compare_head(decoder: HeadDecoder, target: LlamaForCausalLM, texts_BT: Tensor) -> Comparison:
    """Draft chains from every `START_EVERY`-th position after the prompt of each text."""
    starts = list(range(PROMPT_LENGTH - 2, texts_BT.shape[1] - 1 - NUM_STEPS, START_EVERY))
    view = view_target(target, texts_BT)
    drafted, true = [], []
    for row, tokens in enumerate(texts_BT.tolist()):
        drafted.append(decoder.draft_along(tokens, view.features_BTF[row], starts, NUM_STEPS))
        true.append(chains_of(view.logits_BTV[row], starts))
    return Comparison(torch.cat(drafted), torch.cat(true))


def compare_draft(draft: LlamaForCausalLM, target: LlamaForCausalLM, texts_BT: Tensor) -> Comparison:
    """Return the draft model's logits at the positions of `compare_head`."""
    starts = list(range(PROMPT_LENGTH - 2, texts_BT.shape[1] - 1 - NUM_STEPS, START_EVERY))
    drafted, true = (model(input_ids=texts_BT, use_cache=False).logits for model in (draft, target))
    rows = range(len(texts_BT))
    return Comparison(
        torch.cat([chains_of(drafted[row], starts) for row in rows]),
        torch.cat([chains_of(true[row], starts) for row in rows]),
    )


def chains_of(logits_TV: Tensor, starts: list[int]) -> Tensor:
    """Return the logits [num_starts, S, V] at the S positions after each start."""
    return torch.stack([logits_TV[start + 1 : start + 1 + NUM_STEPS] for start in starts])


def held_out_quality(model: LlamaForCausalLM, stream: TokenStream, num_windows: int) -> dict[str, float]:
    """Return loss (nats per token) and top-1 accuracy on `num_windows` windows of 512 tokens."""
    losses, hits = [], []
    for _ in range(num_windows // 8):
        tokens = stream.windows(8, 512)
        logits = model(input_ids=tokens, use_cache=False).logits
        losses.append(next_token_loss(logits, tokens))
        hits.append((logits[:, :-1].argmax(-1) == tokens[:, 1:]).float().mean())
    return {"loss": round(torch.stack(losses).mean().item(), 3), "top1": round(torch.stack(hits).mean().item(), 3)}


def answer(model: LlamaForCausalLM, tokenizer: AutoTokenizer, prompt: dict) -> list[int]:
    """Return the greedy continuation of one row of prompts.jsonl, including its end token if it has one."""
    if "text" in prompt:
        ids = tokenizer(prompt["text"], return_tensors="pt")["input_ids"]
    else:
        text = tokenizer.apply_chat_template(prompt["messages"], tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
    output = model.generate(ids, max_new_tokens=MAX_ANSWER_TOKENS, do_sample=False)
    return output[0, ids.shape[1] :].tolist()


@torch.inference_mode()
def evaluate(data: Path, models: Path, prompts_file: Path) -> dict:
    """Return the figures of the model card. Takes a minute or two on one CPU core."""
    cpu = torch.device("cpu")
    torch.manual_seed(3)
    target, draft = load_model(models / "target", cpu), load_model(models / "draft", cpu)
    decoder = HeadDecoder(models / "eagle3", target.model.embed_tokens.weight)
    tokenizer = AutoTokenizer.from_pretrained(models / "target")
    corpus = load_corpus(data, cpu, is_held_out=True, seed=5)

    texts = corpus.code.windows(NUM_TEXTS, TEXT_LENGTH)
    prompts, num_new = texts[:, :PROMPT_LENGTH], TEXT_LENGTH - PROMPT_LENGTH
    greedy = continue_greedily_or_sample(target, prompts, num_new, is_greedy=True)
    sampled = continue_greedily_or_sample(target, prompts, num_new, is_greedy=False)
    head = load_head(models / "eagle3", target)
    difference = check_against_unroll(decoder, head, view_target(target, texts[:1]), texts[0])
    assert difference < 1e-3, f"head decoder and training unroll differ by {difference}"

    rows = [json.loads(line) for line in prompts_file.read_text().split("\n") if line]
    chats = [row for row in rows if "messages" in row]
    answers = [answer(target, tokenizer, row) for row in chats]
    shown = [next(row for row in rows if "text" in row), chats[0]]
    kinds = {"held_out": texts, "target_greedy": greedy, "target_sampled": sampled}
    return {
        "target": quality_of(target, corpus), "draft": quality_of(draft, corpus),
        "head_vs_target": {kind: compare_head(decoder, target, rows).summary() for kind, rows in kinds.items()},
        "draft_vs_target": {kind: compare_draft(draft, target, rows).summary() for kind, rows in kinds.items()},
        "max_logit_difference_decoder_unroll": difference,
        "chats_ended": sum(IM_END in ids or 0 in ids for ids in answers) / len(answers),
        "samples": [{"prompt": row.get("text") or row["messages"][-1]["content"],
                     "answer": tokenizer.decode(answer(target, tokenizer, row))} for row in shown],
    }  # fmt: skip


def quality_of(model: LlamaForCausalLM, corpus: Corpus) -> dict[str, dict[str, float]]:
    """Evaluate a model on held-out text."""
    return {"code": held_out_quality(model, corpus.code, 64), "chat": held_out_quality(model, corpus.chat, 16)}
