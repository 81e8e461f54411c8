"""A plain float64 implementation of block heads, from the published formulas."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor


class PlainBlock:
    """One pass over a whole sequence, dense, with every weight by its published name."""

    def __init__(self, path: Path, target: Path, *, from_anchor: bool) -> None:
        own, shared = (load_file(folder / "model.safetensors") for folder in (path, target))
        self.w = {name: tensor.double() for name, tensor in own.items()}
        raw = json.loads((path / "config.json").read_text())
        self.config = raw.get("transformer_layer_config", raw)
        self.options = raw | raw.get("dflash_config", {})
        self.embedding = self.w.get("embed_tokens.weight", shared["model.embed_tokens.weight"].double())
        d2t = own.get("d2t", torch.zeros(len(shared["lm_head.weight"]), dtype=torch.int64))
        self.target_ids = torch.arange(len(d2t)) + d2t
        self.head = self.w.get("lm_head.weight", shared["lm_head.weight"].double()[self.target_ids])
        self.from_anchor = from_anchor

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * self.w[f"{name}.weight"]

    def fuse(self, taps: Tensor) -> Tensor:
        return self.norm(taps.double() @ self.w["fc.weight"].T, "hidden_norm")

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        half, theta = x.shape[-1] // 2, (self.config.get("rope_parameters") or self.config).get("rope_theta", 10000.0)
        angle = positions[:, None, None] / theta ** (torch.arange(half, dtype=torch.float64) / half)
        low, high = x[..., :half], x[..., half:]
        return torch.cat([low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()], dim=-1)

    def attention(self, x: Tensor, context: Tensor, name: str, window: int | None) -> Tensor:
        size, p = self.config["head_dim"], len(context)
        rows = torch.cat([context, x])
        q = (x @ self.w[f"{name}q_proj.weight"].T).view(len(x), -1, size)
        k, v = ((rows @ self.w[f"{name}{n}_proj.weight"].T).view(len(rows), -1, size) for n in "kv")
        positions = torch.arange(len(rows))
        q = self.rotate(self.norm(q, f"{name}q_norm"), positions[p:])
        k = self.rotate(self.norm(k, f"{name}k_norm"), positions)
        distance = positions[p:, None] - positions
        sees = torch.ones_like(distance, dtype=torch.bool)
        if window or self.options.get("causal"):
            sees = distance >= 0
        if window:
            sees = sees & (distance < window)
        group = q.shape[1] // k.shape[1]
        heads = []
        for head in range(q.shape[1]):
            scores = (q[:, head] @ k[:, head // group].T / size**0.5).masked_fill(~sees, float("-inf"))
            heads.append(scores.softmax(-1) @ v[:, head // group])
        return torch.cat(heads, dim=-1) @ self.w[f"{name}o_proj.weight"].T

    def hidden(self, anchor: int, context: Tensor) -> Tensor:
        """Return the normed output [depths, H] of the slots that predict."""
        slots = [anchor] + [self.options["mask_token_id"]] * (self.options["block_size"] - 1)
        h = self.embedding[slots]
        kinds = self.config.get("layer_types") or ["full_attention"] * self.config["num_hidden_layers"]
        for index, kind in enumerate(kinds):
            name = f"layers.{index}."
            window = self.config["sliding_window"] if kind == "sliding_attention" else None
            h = h + self.attention(self.norm(h, f"{name}input_layernorm"), context, f"{name}self_attn.", window)
            y = self.norm(h, f"{name}post_attention_layernorm")
            gate, up = (y @ self.w[f"{name}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
            h = h + (gate * gate.sigmoid() * up) @ self.w[f"{name}mlp.down_proj.weight"].T
        return self.norm(h, "norm")[0 if self.from_anchor else 1 :]

    def logits(self, anchor: int, context: Tensor, path: list[int]) -> Tensor:
        """Return the logits of the child of a path below the anchor; the mask token has none."""
        hidden = self.hidden(anchor, context)[len(path)]
        logits = hidden @ self.head.T
        if "markov_head.markov_w1.weight" in self.w:
            e = self.w["markov_head.markov_w1.weight"][[anchor, *path][-1]]
            if self.options.get("markov_head_type") == "gated":
                x = torch.cat([hidden, e]) @ self.w["markov_head.gate_proj.weight"].T
                e = (x + self.w["markov_head.gate_proj.bias"]).sigmoid() * e
            logits = logits + self.w["markov_head.markov_w2.weight"] @ e
        return logits.masked_fill(self.target_ids == self.options["mask_token_id"], float("-inf"))
