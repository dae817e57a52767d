"""python -m mamba_fsdp average RUN [OUT] [--OPTION=VALUE ...]

Write the mean of checkpoints of RUN, in fp32, into the new folder OUT (default:
RUN-average): a model that evaluate, generate, export and --init_from take. If
the learning rate was constant, it is about the model that a decay would give
(docs/checkpoints.md). The setting keep_every keeps checkpoints for it.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from mamba_fsdp.errors import UserError
from mamba_fsdp.fields import setting
from mamba_fsdp.importing.kinds import unexpected_path_error
from mamba_fsdp.run.layout import list_committed, step_of
from mamba_fsdp.run.names import CHECKPOINTS
from mamba_fsdp.verbs import evaluate


@dataclass
class Options:
    last: int = setting(5, at_least=2)
    """How many of the newest checkpoints."""
    steps: list[int] = setting([])
    """The steps of the checkpoints instead, as in 1000,2000,3000."""
    weights: list[float] = setting([])
    """A weight for each checkpoint, oldest first, as in 1,2,3. Empty: all count the same."""
    evaluate: str = setting("", is_path=True)
    """Data: evaluates each checkpoint and the mean on it, as `evaluate MODEL DATA` does."""


def main(run: str, out: str = "", *, options: Options) -> None:
    kept = {step_of(path.name): path for path in list_committed(Path(run, CHECKPOINTS))}
    if not kept:
        raise unexpected_path_error(run, "a run with checkpoints")
    steps = options.steps or [*kept][-options.last :]
    count = len(options.steps) or options.last
    chosen = [kept[step] for step in steps if step in kept]
    if len(chosen) < max(2, count):
        raise UserError(
            f"{run} does not keep the {count} checkpoints asked for; it keeps: {', '.join(map(str, kept))}"
        )
    weights = options.weights or [1.0] * count
    total = sum(weights)
    if len(weights) != count or min(weights) < 0 or not 0 < total < math.inf:
        raise UserError(
            f"--weights: give {count} numbers, one for each checkpoint, 0 or more, not all 0, and not too large to add"
        )
    if options.evaluate:
        evaluate.stores_in(options.evaluate, run)  # refuses what is no data
    from mamba_fsdp.interop.convert import write_mean

    out = out or f"{Path(run)}-average"
    write_mean(chosen, [weight / total for weight in weights], Path(out))
    print(out)
    if options.evaluate:
        for model in (*chosen, out):
            evaluate.main(str(model), options.evaluate, options=evaluate.CommandConfig())
