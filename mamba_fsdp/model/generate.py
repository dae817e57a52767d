"""Drawing text from a model, token by token, with recurrent state: constant time and memory per token in SSM layers."""

import ctypes
from functools import partial

import torch

from mamba_fsdp.errors import UserError
from mamba_fsdp.model.native_step import native_step
from mamba_fsdp.ops import cpp

ARGUMENTS = [ctypes.c_int64] * 3 + [
    ctypes.c_void_p,
    ctypes.c_double,
    ctypes.c_int64,
    ctypes.c_double,
]  # of draw.c
ARGUMENTS += [ctypes.c_void_p] * 3
NOT_FINITE = "the model's answer is not finite: its weights are broken, or its training diverged"


@torch.no_grad()
def generate(model, prompts, *, length, temperature=1.0, top_k=0, top_p=1.0, generator=None):
    """Yield `length` tokens, (batch,) int64 each, that continue the prompts: (batch, at least 1), or a list of (length)
    each, read one by one, since padding would be read too.

    temperature 0 takes the likeliest token; top_k and top_p as in `draw`; generator: the torch.Generator to draw from,
    on the model's device. Rows of the vocabulary's padding are never drawn. Small models of SSM layers on a CPU step in
    C where there is a compiler.
    """
    groups = (
        [prompts] if isinstance(prompts, torch.Tensor) else [prompt[None] for prompt in prompts]
    )
    assert all(group.shape[1] > 0 for group in groups) and length > 0, (
        "generation continues tokens, by at least one"
    )
    states = [model.allocate_state(len(group), group.shape[1] + length - 1) for group in groups]
    logits = torch.cat([model.prefill(group, state) for group, state in zip(groups, states)])
    if not model.config.has("attention"):  # a state does not know how many positions it has seen
        states = [_joined(states)] if len(states) > 1 else states
    in_c = [native_step(model, state) for state in states]
    steps = [step or partial(model.step, state=state) for step, state in zip(in_c, states)]
    draws = draw_in_c if all(in_c) else draw
    for remaining in reversed(range(length)):
        token = draws(
            logits[:, : model.config.vocab_size].float(), temperature, top_k, top_p, generator
        )
        yield token
        if remaining:
            logits = (
                steps[0](token)
                if len(steps) == 1
                else torch.cat(
                    [step(part) for step, part in zip(steps, token.tensor_split(len(steps)))]
                )
            )


def _joined(states):
    """The state of all rows as one batch."""
    layers = [
        {name: torch.cat([layer[name] for layer in same]) for name in same[0]}
        for same in zip(*(state["layers"] for state in states))
    ]
    return max(states, key=lambda state: state["max_length"]) | {"layers": layers}


def draw(logits, temperature, top_k, top_p, generator):
    """One token per row of logits (batch, vocabulary), drawn from the likeliest: top_k of them (0: all), no more than
    it takes to make up the probability top_p (nucleus sampling, Holtzman et al. 2019). Raises UserError for logits that
    are not finite."""
    if not logits.isfinite().all():
        raise UserError(NOT_FINITE)
    if temperature == 0:
        return logits.argmax(dim=-1)
    logits, tokens = (logits / max(temperature, 1e-6)).sort(dim=-1, descending=True)
    probabilities = logits.softmax(dim=-1)
    likelier = probabilities.cumsum(dim=-1) - probabilities
    probabilities[likelier >= max(top_p, 1e-30)] = 0
    probabilities[:, top_k or logits.shape[-1] :] = 0
    return tokens.gather(1, torch.multinomial(probabilities, 1, generator=generator)).squeeze(1)


def draw_in_c(logits, temperature, top_k, top_p, generator):
    """As `draw`, of fp32 on a CPU."""
    uniform = torch.rand(len(logits), dtype=torch.float64, generator=generator)
    tokens, scratch = torch.empty(len(logits), dtype=torch.int64), torch.empty(logits.shape[1])
    function = cpp.library(torch.float32).draw
    function.argtypes = ARGUMENTS
    if function(
        *logits.shape,
        logits.stride(0),
        logits.data_ptr(),
        temperature,
        top_k,
        top_p,
        uniform.data_ptr(),
        scratch.data_ptr(),
        tokens.data_ptr(),
    ):
        raise UserError(NOT_FINITE)
    return tokens
