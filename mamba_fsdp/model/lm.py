"""Defines the language model: an embedding, blocks on an fp32 residual stream, a final norm and an output layer."""

from collections.abc import Mapping
from functools import reduce
from itertools import repeat
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mamba_fsdp.conventions import compute_type
from mamba_fsdp.model import spec
from mamba_fsdp.model.config import Layer, ModelConfig
from mamba_fsdp.model.layers import MIXERS, MLP, MixerState, Sublayer, add_parameters, multiply
from mamba_fsdp.ops.attention import Documents
from mamba_fsdp.ops.backends import REFERENCE
from mamba_fsdp.ops.loss import linear_cross_entropy
from mamba_fsdp.ops.norm import add_rms_norm

States = list[dict[str, MixerState]]  # {name of a mixer's module: its state} for each layer


class Block(nn.Module):
    """One layer of the model: a norm, then one mixer or two side by side. If the layer has an MLP, norm2 and the MLP
    follow. If `is_output_normed`, each norm comes after its mixer or MLP instead. Blocks are the units of sharding,
    activation checkpointing and compilation."""

    def __init__(
        self,
        config: ModelConfig,
        layer: Layer,
        backends: Mapping[str, str],
        compute_dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.norm_backend = backends["norm"]
        self.is_output_normed = (
            config.norm_position == "after_attention" and "attention" in layer.mixers
        )
        self.compute_dtype = compute_dtype
        add_parameters(self, {"norm.weight": spec.norm(config.d_model)})
        self.mixer_names = spec.MIXER_NAMES[: len(layer.mixers)]
        for name, mixer in zip(self.mixer_names, layer.mixers):
            self.add_module(name, MIXERS[mixer](config, backends))
        self.mlp = None
        if layer.mlp:
            add_parameters(self, {"norm2.weight": spec.norm(config.d_model)})
            self.mlp = MLP(config, backends)

    def forward(
        self,
        hidden: Tensor,
        residual: Tensor | None = None,
        seq_idx: Tensor | None = None,
        documents: Documents | None = None,
        state: dict[str, MixerState] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns the next (hidden, residual), both (batch, length, d_model). `residual` is fp32. The next block or the
        final norm adds `hidden` to it. state: {name of a mixer's module: its state}; this dict is updated."""
        hidden, residual = self.add_norm(hidden, residual, self.norm)
        outputs = []
        for name in self.mixer_names:
            mixer = getattr(self, name)
            mixer_state = None if state is None else state[name]
            outputs.append(mixer.forward_with_multipliers(hidden, seq_idx, documents, mixer_state))
        hidden = self.norm_output(reduce(torch.add, outputs), self.norm)
        if self.mlp is not None:
            hidden, residual = self.add_norm(hidden, residual, self.norm2)
            hidden = self.norm_output(self.mlp.forward_with_multipliers(hidden), self.norm2)
        return hidden, residual

    def add_norm(
        self, hidden: Tensor, residual: Tensor | None, norm: nn.Module
    ) -> tuple[Tensor, Tensor]:
        """Returns (the input of the mixer or MLP, the new residual)."""
        if self.is_output_normed:
            residual = hidden + (0.0 if residual is None else residual)
            return residual.to(self.compute_dtype), residual.to(compute_type(residual))
        return self.apply_norm(hidden, residual, norm)

    def norm_output(self, output: Tensor, norm: nn.Module) -> Tensor:
        return self.apply_norm(output, None, norm)[0] if self.is_output_normed else output

    def apply_norm(
        self, hidden: Tensor, residual: Tensor | None, norm: nn.Module
    ) -> tuple[Tensor, Tensor]:
        return add_rms_norm(
            hidden, residual, norm.weight, self.eps, self.compute_dtype, backend=self.norm_backend
        )


class MambaLM(nn.Module):
    """A language model with the structure that a ModelConfig describes.

    The constructor does not draw random numbers, and it works on the meta device. The parameters are fp32 and
    uninitialized; their values come from init.py or from a checkpoint.

    backends: the backend of each operator, see ops/backends.py. compute_dtype: the dtype of everything except the
    residual stream, the recurrences and the loss. reset_at_documents: whether `forward` accepts seq_idx; with seq_idx,
    state, convolution and attention do not cross the start of a document.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        backends: Mapping[str, str] = REFERENCE,
        compute_dtype: torch.dtype = torch.float32,
        reset_at_documents: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.backends = backends
        self.compute_dtype = compute_dtype
        self.reset_at_documents = reset_at_documents
        self.backbone = nn.Module()
        add_parameters(self.backbone, {"embedding.weight": spec.embedding(config)})
        self.backbone.layers = nn.ModuleList(
            Block(config, kind, backends, compute_dtype) for kind in config.layer_list()
        )
        add_parameters(self.backbone, {"norm_f.weight": spec.norm(config.d_model)})
        add_parameters(self, {spec.LM_HEAD: spec.output_layer(config)})
        if config.tie_embeddings:
            self.lm_head.weight = self.backbone.embedding.weight

    def enable_context_parallel(self, context: Any) -> None:
        """Splits each sequence over the ranks of `context`, a ContextGroup (see parallel/context.py). `forward` then
        takes the tokens, labels and weights of this rank's positions, but the seq_idx of all positions."""
        for module in self.modules():
            if isinstance(module, Sublayer):
                module.context = context

    def forward(
        self,
        tokens: Tensor,
        states: States | None = None,
        labels: Tensor | None = None,
        seq_idx: Tensor | None = None,
        weights: Tensor | None = None,
        documents: Documents | None = None,
        ends: Tensor | None = None,
    ) -> Any:
        """Returns the logits (batch, length, padded vocabulary) in the compute dtype for tokens (batch, length) int64.

        With `states`, it returns (that result, the states after these tokens), so that a long sequence can be read in
        windows: `logits, states = model(first, [])`, then `logits, states = model(second, states)`. The results equal
        the results of one long window. An empty list starts a sequence. The given states are not changed. Gradients
        flow through the returned states, so detach these where backpropagation through time should end. With `states`,
        seq_idx must be None.

        The states are a list with {name of a mixer's module: its state} for each layer. A state has the tensors

            Mamba-1                "conv" (batch, d_conv - 1, channels), "ssm" (batch, d_inner, d_state)
            Mamba-2                "conv" (batch, d_conv - 1, channels), "ssm" (batch, heads, headdim, d_state)
            Mamba-3                "ssm" (batch, heads, headdim, d_state), and of the last position "x" (batch, heads,
                                   headdim), "B" (batch, heads, d_state) and "angle" (batch, heads, angles)
            Gated DeltaNet         "conv" (batch, d_conv - 1, channels), "ssm" (batch, heads, d_state, headdim)
            attention              "k" and "v" (batch, positions so far, n_kv_head, head_dim)

        "conv" contains the last inputs of the convolution; at the beginning of a sequence, these are fewer than d_conv - 1.
        "ssm" is in fp32 at least.

        With `ends` (batch,), it returns only the logits of one position per row, (batch, padded vocabulary). With
        `labels`, it returns the sum of the token losses in nats, an fp32 scalar.

        labels (batch, length): the token after each position, or -100 to ignore the position. weights (batch, length):
        a factor for each token's loss. seq_idx: see mamba_fsdp/ops. documents: the documents of seq_idx. If
        `documents` is None, they are read from seq_idx, for which the host waits for the device.
        """
        assert seq_idx is None or self.reset_at_documents, (
            "this model was not built to reset at documents"
        )
        if states is not None:
            assert seq_idx is None, "a model reads states or documents, not both"
            layers = states or [
                {name: {} for name in block.mixer_names} for block in self.backbone.layers
            ]
            states = [{name: dict(layer[name]) for name in layer} for layer in layers]
        hidden = self.final_norm(*self.run_blocks(tokens, seq_idx, documents, states))
        if ends is not None:
            hidden = hidden[torch.arange(len(ends), device=ends.device), ends]
        if labels is None:
            result = self.lm_head(hidden)
        else:
            result = self.loss(hidden, labels, weights)
        return result if states is None else (result, states)

    def run_blocks(
        self,
        tokens: Tensor,
        seq_idx: Tensor | None = None,
        documents: Documents | None = None,
        states: States | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns (hidden, residual) after all blocks, both (batch, length, d_model). states: see `forward`. They are
        updated, and seq_idx must then be None."""
        hidden = F.embedding(tokens, self.backbone.embedding.weight)
        residual = None
        if seq_idx is not None and documents is None:
            documents = Documents.of(seq_idx)
        hidden = multiply(hidden.to(self.compute_dtype), self.config.multiplier("embedding"))
        for block, state in zip(self.backbone.layers, states or repeat(None)):
            hidden, residual = block(hidden, residual, seq_idx, documents, state)
        return hidden, residual

    def loss(
        self,
        hidden: Tensor,
        labels: Tensor,
        weights: Tensor | None = None,
        chunk: int | None = None,
    ) -> Tensor:
        """Returns the sum of the token losses in nats, an fp32 scalar. hidden: the output of `final_norm`. chunk: the
        number of tokens per chunk of logits; None: the default of the device."""
        return linear_cross_entropy(
            hidden.flatten(0, 1),
            self.lm_head.weight,
            labels.flatten(),
            None if weights is None else weights.flatten(),
            chunk=chunk,
            backend=self.backends["loss"],
        )

    def final_norm(self, hidden: Tensor, residual: Tensor) -> Tensor:
        """Returns the input of the output layer, (batch, length, d_model), already multiplied by the multiplier of the
        logits."""
        normed, _ = add_rms_norm(
            hidden,
            residual,
            self.backbone.norm_f.weight,
            self.config.norm_eps,
            self.compute_dtype,
            backend=self.backends["norm"],
        )
        logits = self.config.multiplier("logits") / self.config.multiplier("logits_divisor")
        return multiply(normed, logits)

    def fp32_parameter_names(self) -> set[str]:
        """Returns the names of the parameters that stay in fp32 in every precision mode."""
        return {name for name, parameter in spec.parameters(self.config).items() if parameter.fp32}
