"""python -m mamba_fsdp average RUN [OUT] [--OPTION=VALUE ...]

Write the mean of several checkpoints of RUN, in fp32, into the new folder OUT
(default: RUN-average). The result is a model for evaluate, generate, export and
--init_from. After training with a constant learning rate, it is about as good
as the model after a learning rate decay (docs/checkpoints.md). Use the setting
keep_every to keep checkpoints for it.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from mamba_fsdp.errors import UserError
from mamba_fsdp.fields import setting
from mamba_fsdp.importing.kinds import unexpected_path_error
from mamba_fsdp.run.layout import checkpoints_by_step
from mamba_fsdp.verbs import evaluate


@dataclass
class Options:
    last: int = setting(5, at_least=2)
    """Number of newest checkpoints to average."""
    steps: list[int] = setting([])
    """Steps of the checkpoints to average, for example 1000,2000,3000. Empty: the newest ones."""
    weights: list[float] = setting([])
    """Weight of each checkpoint, the oldest first, for example 1,2,3. Empty: equal weights."""
    evaluate: str = setting("", is_path=True)
    """Data on which to evaluate each checkpoint and the mean, as with `evaluate MODEL DATA`."""


def main(run: str, out: str = "", *, options: Options) -> None:
    kept = checkpoints_by_step(run)
    if not kept:
        raise unexpected_path_error(run, "a run with checkpoints")
    steps = options.steps or [*kept][-options.last :]
    count = len(options.steps) or options.last
    chosen = [kept[step] for step in steps if step in kept]
    if len(chosen) < max(2, count):
        raise UserError(
            f"{run} does not have the {count} requested checkpoints; choose at least two of the steps {', '.join(map(str, kept))}"
        )
    weights = options.weights or [1.0] * count
    total = sum(weights)
    if len(weights) != count or min(weights) < 0 or not 0 < total < math.inf:
        raise UserError(
            f"--weights: give {count} numbers, one for each checkpoint; no weight can be negative, and their sum must be "
            "positive and finite"
        )
    if options.evaluate:
        evaluate.find_stores(options.evaluate, run)  # raises UserError early if it is not data
    from mamba_fsdp.interop.convert import write_mean

    out = out or f"{Path(run)}-average"
    write_mean(chosen, [weight / total for weight in weights], Path(out))
    print(out)
    if options.evaluate:
        for model in (*chosen, out):
            evaluate.main(str(model), options.evaluate, options=evaluate.CommandConfig())
