"""The target and the draft model: two small Llamas. The target is trained on text, the draft distilled from it."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from training.data import Corpus
from training.schedule import Optimisers, TimeBudget

END_IDS = [0, 2]
"""<|endoftext|> and <|im_end|>."""
DISTIL_WEIGHT = 0.9
"""Weight of the target's distribution in the draft's loss; the rest is the text itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """The shape of training batches."""

    num_rows: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """The batch shapes of one device; every `long_every`-th step of the target is a long one."""

    target: BatchShape
    target_long: BatchShape
    long_every: int
    draft: BatchShape
    head: BatchShape
    num_unrolled: int
    num_generated: int
    """Continuations the target writes for the head and the draft, per temperature."""


CPU_SHAPES = Shapes(
    target=BatchShape(num_rows=8, length=256),
    target_long=BatchShape(num_rows=2, length=1024),
    long_every=12,
    draft=BatchShape(num_rows=8, length=256),
    head=BatchShape(num_rows=8, length=192),
    num_unrolled=6,
    num_generated=64,
)
CUDA_SHAPES = Shapes(
    target=BatchShape(num_rows=64, length=512),
    target_long=BatchShape(num_rows=16, length=2048),
    long_every=8,
    draft=BatchShape(num_rows=64, length=512),
    head=BatchShape(num_rows=32, length=512),
    num_unrolled=7,
    num_generated=1536,
)
TINY_SHAPES = Shapes(
    target=BatchShape(num_rows=2, length=64),
    target_long=BatchShape(num_rows=1, length=128),
    long_every=4,
    draft=BatchShape(num_rows=2, length=64),
    head=BatchShape(num_rows=2, length=64),
    num_unrolled=6,
    num_generated=4,
)


class Trained(NamedTuple):
    """A trained network and how much it saw."""

    model: nn.Module
    num_steps: int
    num_tokens: int

    def record(self) -> dict[str, int]:
        """Return the sizes, for metrics.json."""
        num_parameters = sum(p.numel() for p in self.model.parameters())
        return {"num_parameters": num_parameters, "num_steps": self.num_steps, "num_tokens": self.num_tokens}


def llama_config(**sizes: int) -> LlamaConfig:
    """Return a Llama configuration with these sizes."""
    return LlamaConfig(
        vocab_size=2048,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=END_IDS[0],
        pad_token_id=3,
        **sizes,
    )


def target_config() -> LlamaConfig:
    """Return the target's configuration. heads x head_dim (256) differs from the hidden size (192) on purpose."""
    return llama_config(
        hidden_size=192,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        intermediate_size=512,
    )


def draft_config() -> LlamaConfig:
    """Return the configuration of the draft model."""
    return llama_config(
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        intermediate_size=176,
    )


def mixed_precision(device: torch.device) -> torch.autocast:
    """Return a bfloat16 autocast, enabled where it is faster: on CUDA and, 1.8 times, on CPUs with AVX-512-BF16."""
    is_fast = device.type == "cuda" or torch.cpu._is_avx512_bf16_supported()
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=is_fast)


def next_token_loss(logits_BTV: Tensor, tokens_BT: Tensor) -> Tensor:
    """Return the mean cross-entropy of the next tokens."""
    return F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1).float(), tokens_BT[:, 1:].flatten())


def train_target(corpus: Corpus, shapes: Shapes, budget: TimeBudget, device: torch.device) -> Trained:
    """Train from scratch until the budget is spent."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(target_config()).to(device)
    optimisers = Optimisers(model, budget.fraction, "target")
    while budget.fraction() < 1:
        is_long = optimisers.num_steps % shapes.long_every == shapes.long_every - 1
        shape = shapes.target_long if is_long else shapes.target
        tokens = corpus.batch(shape.num_rows, shape.length)
        with mixed_precision(device):
            logits = model(input_ids=tokens, use_cache=False).logits
        optimisers.step(next_token_loss(logits, tokens), tokens.numel())
    return Trained(model, optimisers.num_steps, optimisers.num_tokens)


def distil_loss(logits_BTV: Tensor, target_logits_BTV: Tensor, tokens_BT: Tensor) -> Tensor:
    """Return the cross-entropy against the target's distribution, mixed with that of the text."""
    log_q = logits_BTV.float().log_softmax(-1)
    soft = -(target_logits_BTV.float().softmax(-1) * log_q).sum(-1).mean()
    hard = F.nll_loss(log_q[:, :-1].flatten(0, 1), tokens_BT[:, 1:].flatten())
    return DISTIL_WEIGHT * soft + (1 - DISTIL_WEIGHT) * hard


def train_draft(
    target: LlamaForCausalLM, corpus: Corpus, own_text: Tensor, shapes: Shapes, budget: TimeBudget, device: torch.device
) -> Trained:
    """Distil the target on the corpus and, every third batch, on its own text [num_texts, length]."""
    torch.manual_seed(1)
    model = LlamaForCausalLM(draft_config()).to(device)
    optimisers = Optimisers(model, budget.fraction, "draft")
    while budget.fraction() < 1:
        tokens = mixed_batch(corpus, own_text, shapes.draft, optimisers.num_steps, own_every=3)
        with mixed_precision(device):
            with torch.no_grad():
                target_logits = target(input_ids=tokens, use_cache=False).logits
            logits = model(input_ids=tokens, use_cache=False).logits
        optimisers.step(distil_loss(logits, target_logits, tokens), tokens.numel())
    return Trained(model, optimisers.num_steps, optimisers.num_tokens)


def mixed_batch(corpus: Corpus, own_text: Tensor, shape: BatchShape, step: int, own_every: int) -> Tensor:
    """Return a corpus batch, or at every `own_every`-th step rows of the target's own text [num_rows, <= length]."""
    if step % own_every == own_every - 1:
        rows = torch.randint(0, len(own_text), (shape.num_rows,), device=own_text.device)
        return own_text[rows, : shape.length]
    return corpus.batch(shape.num_rows, shape.length)


@torch.inference_mode()
def continue_greedily_or_sample(model: LlamaForCausalLM, prompts_BT: Tensor, num_new: int, is_greedy: bool) -> Tensor:
    """Continue all prompts by exactly `num_new` tokens, greedily or at temperature 1; return [B, T + num_new]."""
    pieces, cache, last = [prompts_BT], None, prompts_BT
    for _ in range(num_new):
        with mixed_precision(prompts_BT.device):
            output = model(input_ids=last, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, logits = output.past_key_values, output.logits[:, -1].float()
        last = logits.argmax(-1, keepdim=True) if is_greedy else logits.softmax(-1).multinomial(1)
        pieces.append(last)
    return torch.cat(pieces, dim=1)


def write_own_text(model: LlamaForCausalLM, corpus: Corpus, shapes: Shapes, budget: TimeBudget) -> Tensor:
    """Return the target's continuations of corpus and chat windows [num_texts, length of the head's batches].

    Greedy and sampled batches alternate, at least one of each, until the budget or the count is reached.
    """
    prompt_length = 48 if shapes.head.length > 128 else 16
    num_rows = min(shapes.num_generated, 512)
    texts: list[Tensor] = []
    while len(texts) < 2 or (len(texts) * num_rows < 2 * shapes.num_generated and budget.fraction() < 1):
        prompts = torch.cat([corpus.code.windows(num_rows * 3 // 4, prompt_length),
                             corpus.chat.windows(num_rows - num_rows * 3 // 4, prompt_length)])  # fmt: skip
        num_new = shapes.head.length - prompt_length
        texts.append(continue_greedily_or_sample(model, prompts, num_new, is_greedy=len(texts) % 2 == 0))
    return torch.cat(texts).clone()


def save_model(model: LlamaForCausalLM, tokenizer_folder: Path, folder: Path) -> None:
    """Write a Hugging Face checkpoint in bf16 with its tokenizer; `model` is not changed."""
    folder.mkdir(parents=True, exist_ok=True)
    shipped = LlamaForCausalLM(model.config).to(torch.bfloat16)
    shipped.load_state_dict(model.state_dict())
    shipped.save_pretrained(folder)
    generation = {"bos_token_id": 0, "eos_token_id": END_IDS, "pad_token_id": 3}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    (folder / "model.safetensors").chmod(0o644)
    for file in sorted(tokenizer_folder.iterdir()):
        shutil.copy(file, folder / file.name)


def load_model(folder: Path, device: torch.device) -> LlamaForCausalLM:
    """Load a saved checkpoint, converted to fp32 and frozen."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    return model.to(device).eval().requires_grad_(False)
