"""What a token costs: `python -m benchmarks.generate [PRESET]`, demo by default.

On this machine's CPU, rows continued together: through the model's modules in Python with the whole vocabulary sorted
for each draw, and as `generate` does it, in C where it can. One call of each in turn; medians of their seconds, of CPU
seconds (which others on the machine disturb less) and of the ratio. Behind it the bound: the least time that one thread
needs to read the weights, and that of a step in C.
"""

import statistics
import sys
import time
from functools import partial

import torch

from config.model_config import ModelConfig
from config.presets import preset
from mamba_fsdp.model.generate import draw, draw_in_c
from mamba_fsdp.model.init import initial_value
from mamba_fsdp.model.lm import MambaLM
from mamba_fsdp.model.native_step import native_step
from mamba_fsdp.model.spec import parameters
from mamba_fsdp.ops import cpp

ROUNDS, TOKENS = 15, 20
HOW = {
    "the likeliest": (0, 0, 1.0),
    "temperature 0.8": (0.8, 0, 1.0),
    "top_k 50, top_p 0.9": (0.8, 50, 0.9),
}


def seconds(step, draws, token, how, generator):
    """(seconds, CPU seconds) of a token."""
    began, cpu_began = time.perf_counter(), time.process_time()
    for _ in range(TOKENS):
        token = draws(step(token), *how, generator)
    return (time.perf_counter() - began) / TOKENS, (time.process_time() - cpu_began) / TOKENS


def least(function):
    """Milliseconds of a call, of the shortest of many."""
    times = [time.perf_counter()]
    for _ in range(2000):
        function()
        times.append(time.perf_counter())
    return 1e3 * min(after - before for before, after in zip(times, times[1:]))


@torch.no_grad()
def main(name="demo"):
    cpp.tune_process("cpu")
    config = ModelConfig(**preset(name))
    model = MambaLM(config)
    for parameter_name, parameter in model.named_parameters():
        parameter.copy_(initial_value(parameter_name, parameters(config)[parameter_name], 0))
    generator = torch.Generator().manual_seed(0)
    print(
        f"{name}, torch {torch.__version__}, {torch.get_num_threads()} threads; ms a token of all rows"
    )
    print(
        f"{'rows':>4} {'drawn':<22}{'modules':>9}{'CPU':>8}{'generate':>10}{'CPU':>8}{'ratio':>8}{'CPU':>8}"
    )
    for rows in (1, 8):
        token = torch.zeros(rows, dtype=torch.int64)
        states = [model.allocate_state(rows, 1 << 20) for _ in range(2)]
        ours = native_step(model, states[1])
        assert ours, "no C for this model on this machine"
        for said, how in HOW.items():
            pairs = [
                (
                    seconds(partial(model.step, state=states[0]), draw, token, how, generator),
                    seconds(ours, draw_in_c, token, how, generator),
                )
                for _ in range(ROUNDS)
            ]
            shown = [
                1e3 * statistics.median(pair[side][clock] for pair in pairs)
                for side in (0, 1)
                for clock in (0, 1)
            ]
            ratios = [
                statistics.median(before[clock] / after[clock] for before, after in pairs)
                for clock in (0, 1)
            ]
            print(
                f"{rows:>4} {said:<22}{shown[0]:>9.3f}{shown[1]:>8.3f}{shown[2]:>10.3f}{shown[3]:>8.3f}"
                f"{ratios[0]:>7.1f}x{ratios[1]:>7.1f}x",
                flush=True,
            )
    torch.set_num_threads(1)
    weights, token = (
        torch.randn(sum(parameter.numel() for parameter in model.parameters())),
        token[:1],
    )
    step = native_step(model, model.allocate_state(1, 1 << 20))
    print(
        f"of 1 row, the least: a step {least(lambda: step(token)):.3f}, reading the weights {least(weights.sum):.3f}"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
