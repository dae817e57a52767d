"""The language model that every preset is: embedding, a list of blocks on an fp32 residual stream, norm, output layer."""

import torch
import torch.nn.functional as F
from torch import nn

from mamba_fsdp.model.layers import MIXERS, MLP, Weight
from mamba_fsdp.ops.cross_entropy import linear_cross_entropy
from mamba_fsdp.ops.norm import add_rms_norm

FP32_ENDINGS = (".A_log", ".D", ".dt_bias", ".dt_proj.bias")  # half precision costs up to 1.6 % of dt and 0.8 % of A


class Block(nn.Module):
    """norm, mixer and, where the layer has one, norm2, MLP. The unit of sharding, recomputing and compiling."""

    def __init__(self, config, layer, kernels, compute_dtype):
        super().__init__()
        self.eps, self.kernels, self.compute_dtype = config.norm_eps, kernels, compute_dtype
        self.norm = Weight(config.d_model)
        self.mixer = MIXERS[layer.mixer](config, kernels)
        self.mlp = None
        if layer.mlp:
            self.norm2 = Weight(config.d_model)
            self.mlp = MLP(config)

    def forward(self, hidden, residual=None, documents=None):
        """hidden (batch, length, d_model) is still to be added to residual, fp32 of that shape. Returns the two for the next block."""
        hidden, residual = self.add_norm(hidden, residual, self.norm)
        hidden = self.mixer(hidden, documents)
        return self.feed_forward(hidden, residual)

    def step(self, hidden, residual, state, position):
        """The same for one position (batch, d_model)."""
        hidden, residual = self.add_norm(hidden, residual, self.norm)
        return self.feed_forward(self.mixer.step(hidden, state, position), residual)

    def feed_forward(self, hidden, residual):
        if self.mlp is None:
            return hidden, residual
        hidden, residual = self.add_norm(hidden, residual, self.norm2)
        return self.mlp(hidden), residual

    def add_norm(self, hidden, residual, norm):
        return add_rms_norm(hidden, residual, norm.weight, self.eps, self.compute_dtype, self.kernels)


class Backbone(nn.Module):
    def __init__(self, config, kernels, compute_dtype):
        super().__init__()
        self.embedding = Weight(config.padded_vocab_size, config.d_model)
        self.layers = nn.ModuleList(Block(config, layer, kernels, compute_dtype) for layer in config.layer_list())
        self.norm_f = Weight(config.d_model)


class MambaLM(nn.Module):
    """config: a ModelConfig. Constructing draws no random numbers and works on the meta device; parameters are fp32 and unfilled."""

    def __init__(self, config, *, kernels="portable", compute_dtype=torch.float32, reset_at_documents=False):
        super().__init__()
        self.config, self.kernels, self.compute_dtype, self.reset_at_documents = config, kernels, compute_dtype, reset_at_documents
        self.backbone = Backbone(config, kernels, compute_dtype)
        self.lm_head = Weight(config.padded_vocab_size, config.d_model)
        if config.tie_embeddings:
            self.lm_head.weight = self.backbone.embedding.weight

    def forward(self, tokens, labels=None, documents=None):
        """tokens (batch, length) int64 -> logits (batch, length, padded vocabulary) in the compute dtype.

        With labels (batch, length), -100 where a position does not count: the sum of the token losses, an fp32 scalar.
        documents (batch, length): where each document begins, for a model built with reset_at_documents.
        """
        assert (documents is not None) == self.reset_at_documents or documents is None, "this model was not built to reset at documents"
        hidden, residual = self.embed(tokens), None
        for block in self.backbone.layers:
            hidden, residual = block(hidden, residual, documents)
        hidden = self.final_norm(hidden, residual)
        if labels is None:
            return self.lm_head(hidden)
        return linear_cross_entropy(hidden.flatten(0, 1), self.lm_head.weight, labels.flatten())

    def embed(self, tokens):
        return F.embedding(tokens, self.backbone.embedding.weight).to(self.compute_dtype)

    def final_norm(self, hidden, residual):
        return add_rms_norm(hidden, residual, self.backbone.norm_f.weight, self.config.norm_eps, self.compute_dtype, self.kernels)[0]

    def fp32_parameter_names(self):
        """The parameters that compute in fp32 in every precision mode."""
        return {name for name, _ in self.named_parameters() if name.endswith(FP32_ENDINGS)}

    def allocate_state(self, batch, max_length):
        """Recurrent states, and caches of `max_length` positions where there is attention, for `step`."""
        weight = self.backbone.embedding.weight
        layers = [block.mixer.allocate_state(batch, max_length, self.compute_dtype, weight.device) for block in self.backbone.layers]
        return {"position": 0, "layers": layers}

    def step(self, tokens, state):
        """One position: tokens (batch,) -> logits (batch, padded vocabulary); updates `state`."""
        hidden, residual = self.embed(tokens), None
        for block, layer_state in zip(self.backbone.layers, state["layers"]):
            hidden, residual = block.step(hidden, residual, layer_state, state["position"])
        state["position"] += 1
        return self.lm_head(self.final_norm(hidden, residual))
