"""A plain float64 implementation of P-EAGLE heads, from the published description."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor


class PlainPEagle:
    """One pass over a whole sequence and its mask rows, dense, with every weight by its published name."""

    def __init__(self, path: Path, target: Path) -> None:
        own, shared = (load_file(folder / "model.safetensors") for folder in (path, target))
        self.w = {name.replace("midlayer.", "layers.0."): tensor.double() for name, tensor in own.items()}
        self.options = json.loads((path / "config.json").read_text())
        self.config = self.options.get("transformer_layer_config", self.options)
        self.embedding = self.w.get("embed_tokens.weight", shared["model.embed_tokens.weight"].double())
        self.target_ids = torch.arange(len(own["d2t"])) + own["d2t"]

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * self.w[f"{name}.weight"]

    def rotate(self, x: Tensor) -> Tensor:
        half, theta = x.shape[-1] // 2, self.config.get("rope_theta", 10000.0)
        frequency = theta ** -(torch.arange(half, dtype=torch.float64) / half)
        angle = torch.arange(len(x))[:, None, None] * frequency
        low, high = x[..., :half], x[..., half:]
        return torch.cat([low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()], dim=-1)

    def attention(self, x: Tensor, name: str) -> Tensor:
        heads = self.config["num_attention_heads"]
        size = self.config.get("head_dim") or self.config["hidden_size"] // heads
        q, k, v = ((x @ self.w[f"{name}{n}_proj.weight"].T).view(len(x), -1, size) for n in "qkv")
        q, k = self.rotate(q), self.rotate(k)
        later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        group = heads // k.shape[1]
        mixed = [
            (q[:, n] @ k[:, n // group].T / size**0.5).masked_fill(later, -torch.inf).softmax(-1) @ v[:, n // group]
            for n in range(heads)
        ]
        return torch.cat(mixed, dim=-1) @ self.w[f"{name}o_proj.weight"].T

    def logits(self, tokens: list[int], taps: Tensor, depth: int) -> Tensor:
        """Return the logits [depth, draft vocabulary] behind these tokens. taps: the features of all but the last."""
        mask = self.options.get("mask_token_id") or self.options["ptd_token_id"]
        rows = torch.cat([taps.double(), self.w["mask_hidden"].flatten(0, 1).expand(depth - 1, -1)])
        if "input_norm.weight" in self.w:
            rows = self.norm(rows, "input_norm")
        g = rows @ self.w["fc.weight"].T
        e = self.embedding[[*tokens[1:], *[mask] * (depth - 1)]]
        for index in range(self.config["num_hidden_layers"]):
            name = f"layers.{index}."
            if index == 0:
                normed = self.norm(g, f"{name}hidden_norm")
                h = normed if self.options.get("norm_before_residual") else g
                x = torch.cat([self.norm(e, f"{name}input_layernorm"), normed], dim=-1)
            else:
                x = self.norm(h, f"{name}input_layernorm")
            h = h + self.attention(x, f"{name}self_attn.")
            y = self.norm(h, f"{name}post_attention_layernorm")
            gate, up = (y @ self.w[f"{name}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
            h = h + (gate * gate.sigmoid() * up) @ self.w[f"{name}mlp.down_proj.weight"].T
        return self.norm(h[-depth:], "norm") @ self.w["lm_head.weight"].T
