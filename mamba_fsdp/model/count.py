"""Parameters and FLOPs of a model, counted from its structure, without torch."""

import math


def parameter_shapes(config):
    """dict: parameter name -> shape, in the order of named_parameters(). A tied output layer is not counted twice."""
    d_model = config.d_model
    vocabulary = (config.padded_vocab_size, d_model)
    shapes = {"backbone.embedding.weight": vocabulary}
    for index, layer in enumerate(config.layer_list()):
        prefix = f"backbone.layers.{index}"
        shapes[f"{prefix}.norm.weight"] = (d_model,)
        for name, shape in MIXERS[layer.mixer](config).items():
            shapes[f"{prefix}.mixer.{name}"] = shape
        if layer.mlp:
            shapes[f"{prefix}.norm2.weight"] = (d_model,)
            shapes[f"{prefix}.mlp.fc1.weight"] = (2 * config.d_intermediate, d_model)
            shapes[f"{prefix}.mlp.fc2.weight"] = (d_model, config.d_intermediate)
    shapes["backbone.norm_f.weight"] = (d_model,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = vocabulary
    return shapes


def _mamba1(config):
    d_inner, d_state, rank = config.d_inner, config.d_state, config.resolved_dt_rank
    return {
        "A_log": (d_inner, d_state),
        "D": (d_inner,),
        "in_proj.weight": (2 * d_inner, config.d_model),
        "conv1d.weight": (d_inner, 1, config.d_conv),
        "conv1d.bias": (d_inner,),
        "x_proj.weight": (rank + 2 * d_state, d_inner),
        "dt_proj.weight": (d_inner, rank),
        "dt_proj.bias": (d_inner,),
        "out_proj.weight": (config.d_model, d_inner),
    }


def _mamba2(config):
    d_inner, heads = config.d_inner, config.n_ssm_head
    convolved = d_inner + 2 * config.ngroups * config.d_state
    return {
        "dt_bias": (heads,),
        "A_log": (heads,),
        "D": (heads,),
        "in_proj.weight": (d_inner + convolved + heads, config.d_model),
        "conv1d.weight": (convolved, 1, config.d_conv),
        "conv1d.bias": (convolved,),
        "norm.weight": (d_inner,),
        "out_proj.weight": (config.d_model, d_inner),
    }


def _attention(config):
    head_dim = config.resolved_head_dim
    return {
        "in_proj.weight": ((config.n_head + 2 * config.n_kv_head) * head_dim, config.d_model),
        "out_proj.weight": (config.d_model, config.n_head * head_dim),
    }


MIXERS = {"mamba1": _mamba1, "mamba2": _mamba2, "attention": _attention}


def parameter_count(config):
    return sum(math.prod(shape) for shape in parameter_shapes(config).values())


def flops_per_token(config, seq_length):
    """Training FLOPs per token at sequences of `seq_length`: three times the forward pass's (the backward takes two).

    The forward has 2 per multiply-add: of every matrix, the output layer among them and the embedding's lookup not; of
    the convolutions; of the recurrence, counted once as the three multiply-adds of each state (decay, input, share of
    the output), whatever form computes it; and of attention's scores, only in attention layers, with the
    seq_length / 2 positions that a causal one sees on average. Norms, gates and activations are not counted.
    """
    multiply_adds = config.padded_vocab_size * config.d_model  # the output layer, tied or not
    for name, shape in parameter_shapes(config).items():
        in_layer = name.startswith("backbone.layers.")
        if in_layer and len(shape) >= 2 and not name.endswith(".A_log"):
            multiply_adds += math.prod(shape)
    for layer in config.layer_list():
        if layer.mixer == "attention":
            multiply_adds += 2 * config.n_head * config.resolved_head_dim * seq_length / 2  # q . k, then weights . v
        else:
            multiply_adds += 3 * config.d_inner * config.d_state
    return 3 * 2 * multiply_adds
