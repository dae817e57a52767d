"""lm-evaluation-harness on a model of ours, as it is: evaluate --tasks.

Its `hf` model on the model's export gives the same numbers: equal tokens, windows, and what is cut from long texts.
"""

import itertools
import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from config.fields import near_name
from mamba_fsdp.data.hub import why_offline
from mamba_fsdp.data.tokenizer import load_words
from mamba_fsdp.errors import UserError, first_line
from mamba_fsdp.parallel.world import World
from mamba_fsdp.verbs.generate import continuations
from mamba_fsdp.verbs.loading import Loaded

OFFLINE = why_offline()  # before the harness's libraries ask
try:
    import lm_eval
    from lm_eval.api.model import TemplateLM
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise UserError(
        f"--tasks needs lm-evaluation-harness ({first_line(error)}): pip install lm_eval"
    ) from error


class OurModel(TemplateLM):
    """What the harness asks of a model. Rows are padded on the right, which no score sees."""

    def __init__(self, model: Loaded, world: World, max_length: int, batch_size: int):
        super().__init__()
        self.model, self.world, self.max_length, self.batch_size = (
            model,
            world,
            max_length,
            batch_size,
        )
        self.words = load_words(model.tokenizer_path)
        self._rank, self._world_size, self._device = world.rank, world.size, world.device

    @property
    def eot_token_id(self):
        if self.words.eos is None:
            raise UserError(
                "--tasks: the model's tokenizer names no token that ends a document, for texts to begin"
            )
        return self.words.eos

    def all_gather(self, tensor):
        return torch.cat(
            self.world.broadcast_object(self.world.gather_on_rank0(tensor.reshape(-1)))
        )

    def gather_object(self, obj, dst=0):
        return self.world.gather_on_rank0(obj) or None

    def barrier(self):
        self.world.barrier()

    def tok_encode(self, string, add_special_tokens=None, **_):
        return self.words.encode(string)

    @torch.no_grad()
    def _loglikelihood_tokens(self, requests, **_):
        """(log-likelihood of the continuation, whether it is the likeliest at each token) for each request (_, context
        ids, continuation ids)."""
        found, network = {}, self.model.network
        order = sorted(
            range(len(requests)), key=lambda at: -len(requests[at][1]) - len(requests[at][2])
        )
        for start in range(0, len(order), self.batch_size):
            batch = order[start : start + self.batch_size]
            rows = [
                torch.tensor((requests[at][1] + requests[at][2])[-self.max_length - 1 :])
                for at in batch
            ]
            tokens = torch.nn.utils.rnn.pad_sequence(
                [row[:-1] for row in rows], batch_first=True
            ).to(self._device)
            hidden = network.final_norm(*network.read(tokens))
            for at, row, states in zip(batch, rows, hidden):
                wanted = row[-len(requests[at][2]) :].to(self._device)
                scores = network.lm_head(states[len(row) - 1 - len(wanted) : len(row) - 1])
                scores = scores.float().log_softmax(dim=-1)
                found[at] = (
                    float(scores.gather(1, wanted[:, None]).sum()),
                    bool((scores.argmax(dim=-1) == wanted).all()),
                )
        return [found[at] for at in range(len(requests))]

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        windows = [
            [
                (None, *make_disjoint_window(window))
                for window in get_rolling_token_windows(
                    self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, 1
                )
            ]
            for request in requests
        ]
        scores = iter(self._loglikelihood_tokens([*itertools.chain.from_iterable(windows)]))
        return [sum(score for score, _ in itertools.islice(scores, len(own))) for own in windows]

    def generate_until(self, requests, disable_tqdm=False):
        texts = [""] * len(requests)
        for wanted, numbers in itertools.groupby(
            sorted(range(len(requests)), key=lambda at: str(requests[at].args[1])),
            key=lambda at: requests[at].args[1],
        ):
            for batch in iter(
                lambda numbers=numbers: [*itertools.islice(numbers, self.batch_size)], []
            ):
                until = wanted.get("until") or []
                how = {
                    name: wanted[name]
                    for name in ("top_k", "top_p")
                    if wanted.get("do_sample") and name in wanted
                }
                temperature = wanted.get("temperature", 1.0) if wanted.get("do_sample") else 0
                for piece in continuations(
                    self.model,
                    [requests[at].args[0] for at in batch],
                    temperature=temperature,
                    length=wanted.get("max_gen_toks", 256),
                    stop=[until] if isinstance(until, str) else until,
                    **how,
                ):
                    texts[batch[piece.prompt]] += piece.text
        return texts


def run(model: Loaded, options: Any, world: World, windows: Mapping[str, int]) -> dict[str, Any]:
    """{task: {metric: value}} of the tasks in `options`, called by all ranks. Raises UserError."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    known = TaskManager(include_path=options.include_path or None, include_defaults=False)
    if not {*options.tasks} <= {*known.all_tasks}:
        known = TaskManager(
            include_path=options.include_path or None
        )  # it reads thousands of files for it
    for name in options.tasks:
        if name not in known.all_tasks and not any(sign in name for sign in "*/."):
            near = near_name(name, known.all_tasks, "lm_eval ls tasks lists them")
            raise UserError(f"--tasks={name}: there is no such task; {near}")
    ours = OurModel(model, world, windows["seq_length"], windows["batch_size"])
    try:
        found = lm_eval.simple_evaluate(
            ours,
            tasks=options.tasks,
            task_manager=known,
            limit=windows["limit"] or None,
            num_fewshot=None if options.num_fewshot < 0 else options.num_fewshot,
        )
    except UserError:
        raise
    except Exception as error:  # of data that can't be had, above all
        network = f"; no network: {OFFLINE}" if OFFLINE else ""
        raise UserError(
            f"--tasks={','.join(options.tasks)}: {first_line(error)}{network}"
        ) from error
    return {
        task: {name.removesuffix(",none"): value for name, value in told.items()}
        for task, told in (found or {"results": {}})["results"].items()
    }


def table(found: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """A line for each number of `found`, as `run` returns it."""
    for task, told in found.items():
        for name, value in told.items():
            error = told.get(f"{name}_stderr")
            if isinstance(value, float) and not name.endswith("_stderr"):
                within = (
                    f" +- {error:.4f}" if isinstance(error, float) and math.isfinite(error) else ""
                )
                yield f"{task:<32}{name:<24}{value:>12,.4f}{within}"
