"""A small language model with the parts that sharding cares about: blocks, a tied head, parameters that stay fp32."""

import torch
import torch.nn.functional as F
from torch import nn


class Mixer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.in_proj = nn.Linear(width, 2 * width, bias=False)
        self.A_log = nn.Parameter(torch.empty(2 * width, 3))
        self.D = nn.Parameter(torch.empty(2 * width))
        self.out_proj = nn.Linear(2 * width, width, bias=False)

    def forward(self, hidden):
        inner = F.linear(hidden, self.in_proj.weight.to(hidden.dtype))
        inner = inner.float() * torch.exp(-self.A_log.exp()).sum(1) + self.D
        return F.linear(torch.tanh(inner).to(hidden.dtype), self.out_proj.weight.to(hidden.dtype))


class Block(nn.Module):
    def __init__(self, width, dtype):
        super().__init__()
        self.norm = nn.LayerNorm(width, bias=False)
        self.mixer = Mixer(width)
        self.dtype = dtype

    def forward(self, hidden, residual, seq_idx):
        residual = hidden.float() if residual is None else hidden + residual
        normed = F.layer_norm(residual, residual.shape[-1:], self.norm.weight.float())
        return self.mixer(normed.to(self.dtype)), residual


class Double(nn.Module):
    def __init__(self, width=24, layers=3, vocab=50, compute_dtype=torch.float32, tie=True):
        super().__init__()
        self.dtype = compute_dtype
        self.loss_factor = 1.0
        self.backbone = nn.Module()
        self.backbone.embedding = nn.Embedding(vocab, width)
        self.backbone.layers = nn.ModuleList(Block(width, compute_dtype) for _ in range(layers))
        self.backbone.norm_f = nn.LayerNorm(width, bias=False)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        if tie:
            self.lm_head.weight = self.backbone.embedding.weight

    def fp32_parameter_names(self):
        return {name for name, _ in self.named_parameters() if name.endswith((".A_log", ".D"))}

    def forward(self, tokens, labels=None, seq_idx=None, weights=None, documents=None):
        hidden, residual = F.embedding(tokens, self.backbone.embedding.weight).to(self.dtype), None
        for block in self.backbone.layers:
            hidden, residual = block(hidden, residual, seq_idx)
        hidden = F.layer_norm(
            hidden + residual, hidden.shape[-1:], self.backbone.norm_f.weight.float()
        ).to(self.dtype)
        logits = F.linear(hidden, self.lm_head.weight.to(self.dtype))
        if labels is None:
            return logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
        return loss * self.loss_factor
