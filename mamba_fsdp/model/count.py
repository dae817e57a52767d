"""Parameters and FLOPs of a model, counted from its structure, without torch."""

import math


def parameter_shapes(config):
    """dict: parameter name -> shape, in the order of the model's named_parameters(); a tied output layer is not counted twice."""
    d_model, d_inner = config.d_model, config.d_inner
    vocabulary = (config.padded_vocab_size, d_model)
    shapes = {"backbone.embedding.weight": vocabulary}
    for index, layer in enumerate(config.layer_list()):
        own = {"norm.weight": (d_model,), **{f"mixer.{name}": shape for name, shape in _MIXERS[layer.mixer](config, d_model, d_inner).items()}}
        if layer.mlp:
            own |= {"norm2.weight": (d_model,), "mlp.fc1.weight": (2 * config.d_intermediate, d_model), "mlp.fc2.weight": (d_model, config.d_intermediate)}
        shapes |= {f"backbone.layers.{index}.{name}": shape for name, shape in own.items()}
    shapes["backbone.norm_f.weight"] = (d_model,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = vocabulary
    return shapes


def _mamba1(config, d_model, d_inner):
    rank = config.resolved_dt_rank
    return {"A_log": (d_inner, config.d_state), "D": (d_inner,), "in_proj.weight": (2 * d_inner, d_model),
            "conv1d.weight": (d_inner, 1, config.d_conv), "conv1d.bias": (d_inner,), "x_proj.weight": (rank + 2 * config.d_state, d_inner),
            "dt_proj.weight": (d_inner, rank), "dt_proj.bias": (d_inner,), "out_proj.weight": (d_model, d_inner)}


def _mamba2(config, d_model, d_inner):
    heads, convolved = config.n_ssm_head, d_inner + 2 * config.ngroups * config.d_state
    return {"dt_bias": (heads,), "A_log": (heads,), "D": (heads,), "in_proj.weight": (d_inner + convolved + heads, d_model),
            "conv1d.weight": (convolved, 1, config.d_conv), "conv1d.bias": (convolved,), "norm.weight": (d_inner,),
            "out_proj.weight": (d_model, d_inner)}


def _attention(config, d_model, _):
    head_dim = config.resolved_head_dim
    return {"in_proj.weight": ((config.n_head + 2 * config.n_kv_head) * head_dim, d_model), "out_proj.weight": (d_model, config.n_head * head_dim)}


_MIXERS = {"mamba1": _mamba1, "mamba2": _mamba2, "attention": _attention}


def parameter_count(config):
    return sum(math.prod(shape) for shape in parameter_shapes(config).values())


def flops_per_token(config, seq_length):
    """Training FLOPs per token, forward and backward (three times the forward): 2 per multiply-add of every matrix, of the
    convolutions, of the recurrence once, and of attention's scores only where attention is (causal: half the positions)."""
    forward = 0
    for name, shape in parameter_shapes(config).items():
        if len(shape) == 2 and not name.endswith(".A_log") and name != "backbone.embedding.weight":
            forward += 2 * math.prod(shape)
        elif name.endswith("conv1d.weight"):
            forward += 2 * math.prod(shape)
    if config.tie_embeddings:
        forward += 2 * config.padded_vocab_size * config.d_model  # the output layer
    for layer in config.layer_list():
        if layer.mixer == "attention":
            forward += 2 * seq_length * config.n_head * config.resolved_head_dim  # q.k and p.v, each 2 * seq_length/2 * width
        else:
            forward += 6 * config.d_inner * config.d_state  # per state: decay and input into it, and its part of the output
    return 3 * forward
