"""Evaluates models on the tasks of lm-evaluation-harness (lm-eval). The package lm-eval must be installed.

pyproject.toml declares MambaFSDP as a plugin of lm-eval. Releases of lm-eval that support plugins can therefore run
`lm_eval --model mamba_fsdp --model_args pretrained=RUN`.
"""

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import Collator, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from mamba_fsdp.data.tokenizer import load_for_transformers
from mamba_fsdp.errors import UserError, first_line
from mamba_fsdp.inference.decoding import generate
from mamba_fsdp.inference.evaluate import DEFAULT_LENGTH
from mamba_fsdp.inference.loading import inference_world, load
from mamba_fsdp.storage.retry import is_folder
from mamba_fsdp.text import suggest_name

STOP_SEARCH_TOKENS = 64  # stop texts are searched in this many tokens at the end of an answer


class MambaFSDP(TemplateLM):
    """A model for lm-eval. It can be any model that `load` accepts. On a GPU it uses the same kernels as training.

    Its results are equal to the results of lm-eval's hf model for the exported model. A context that does not fit into
    a window of max_length tokens loses its beginning.
    """

    def __init__(
        self,
        pretrained: str | Path,
        tokenizer: str = "",
        max_length: int = 0,
        batch_size: int = 8,
        model_name: str = "",
        device: str = "",
        **others: Any,
    ) -> None:
        """Loads the model. The arguments have the same names as for lm-eval's hf model.

        pretrained, model_name: see `load`. max_length: tokens per window; 0: DEFAULT_LENGTH. tokenizer: the path of
        the tokenizer, if the model has none. batch_size: the maximum number of texts in a forward pass. device: it is
        only checked, and must name the kind of device that `load` uses.

        Raises UserError for other arguments, if the model or its tokenizer can't be loaded, and if the tokenizer has
        more tokens than the model."""
        super().__init__()
        here = inference_world().device.type
        if others or not str(batch_size).isdecimal() or not (device or here).startswith(here):
            raise UserError(
                "lm-eval's model mamba_fsdp takes pretrained, tokenizer, max_length, model_name, batch_size (a number) and "
                f"device (on this machine {here})"
            )
        loaded = load(pretrained, model_name=model_name)
        self.source = loaded.weights.source
        self.network: Any = loaded.network
        self.tokenizer = load_for_transformers(tokenizer or loaded.tokenizer_path)
        if len(self.tokenizer) > loaded.weights.config.padded_vocab_size:
            raise UserError(
                f"the tokenizer has {len(self.tokenizer):,} tokens, more than the model; use the model's tokenizer"
            )
        self.max_length = max_length or DEFAULT_LENGTH
        self.batch_size = int(batch_size)

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """Returns the token that is put before a text without context."""
        if self.tokenizer.bos_token is None:
            return self.eot_token_id
        return self.tokenizer.bos_token_id

    def tok_encode(self, text: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens is not False)

    @torch.no_grad()
    def _loglikelihood_tokens(self, requests: list[tuple], **_: Any) -> list[tuple[float, bool]]:
        """Returns (log-probability in nats, whether every token is the most likely one) for each continuation.

        requests: tuples of a key, the ids of the context, and the ids of the continuation. The model reads a context
        only once if several requests share it."""
        collator = Collator(
            requests,
            lambda ask: -len(ask[1] + ask[2]),  # sort key: the longest requests first
            lambda ask: ask[1] + ask[2][:-1],  # group key: the tokens that the model reads
            "contexts",
        )
        answers = []
        for batch in tqdm(list(collator.get_batched(self.batch_size))):
            rows = [(context + ids)[-self.max_length - 1 : -1] for _key, context, ids in batch]
            hidden = self.network.final_norm(*self.network.run_blocks(pad_rows(rows, 0)))
            for request, row, states in zip(batch, rows, hidden):
                scored = states[: len(row)][-len(request[2]) :]
                scores = self.network.lm_head(scored).float().log_softmax(-1)
                for _key, ids, _scores in collator.get_cache(*request, scores[None]):
                    answers.append(score_continuation(scores, ids))
        return collator.get_original(answers)

    def loglikelihood_rolling(self, requests: list[Any], **_: Any) -> list[float]:
        """Returns the log-probability in nats of each text. Long texts are split into windows of max_length tokens that
        do not overlap."""
        windows = []
        for index, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            pairs = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1)
            windows += [(index, *make_disjoint_window(pair)) for pair in pairs]
        totals = [0.0] * len(requests)
        for window, answer in zip(windows, self._loglikelihood_tokens(windows)):
            totals[window[0]] += answer[0]
        return totals

    def generate_until(self, requests: list[Any], **_: Any) -> list[str]:
        """Returns the continuation of each prompt. A continuation ends before the first of its task's stop texts."""
        prompts = [(self.tok_encode(request.args[0]), request.args[1]) for request in requests]
        collator = Collator(prompts, lambda item: -len(item[0]), lambda item: item[1], "gen_kwargs")
        texts = []
        for batch in tqdm(list(collator.get_batched(self.batch_size))):
            settings: Any = normalize_gen_kwargs(batch[0][1])
            texts += self.generate_texts([ids for ids, _settings in batch], **settings)
        return collator.get_original(texts)

    def generate_texts(
        self, prompts: list, until: list, max_gen_toks: int, do_sample: bool, **settings: Any
    ) -> list[str]:
        """Returns a continuation of each prompt with at most max_gen_toks tokens. until: the texts that end an answer.
        do_sample: whether the default of the temperature is 1, not 0. settings: temperature, top_k and top_p of
        `generate`. Raises UserError for other settings, and if max_gen_toks leaves no room for a prompt."""
        unknown = settings.keys() - {"temperature", "top_k", "top_p"}
        if unknown:
            raise UserError(
                f"a task sets {', '.join(unknown)}, but generation supports only temperature, top_k and top_p; leave the task out"
            )
        room = self.max_length - max_gen_toks
        if room < 1:
            raise UserError(
                f"a task generates {max_gen_toks} tokens: --seq_length={self.max_length} must be larger, to leave room for a prompt"
            )
        settings.setdefault("temperature", float(do_sample))
        prompts = [ids[-room:] or [self.prefix_token_id] for ids in prompts]
        steps = generate(self.network, pad_rows(prompts, -1), length=max_gen_toks, **settings)
        stops = [stop for stop in [*until, self.tokenizer.eos_token] if stop]
        answers = collect_answers(
            steps, [len(ids) for ids in prompts], max_gen_toks, stops, self.tokenizer
        )
        texts = self.tokenizer.batch_decode(answers, skip_special_tokens=True)
        return [postprocess_generated_text(text, stops, None) for text in texts]


def score_continuation(scores: torch.Tensor, ids: list[int]) -> tuple[float, bool]:
    """Returns (log-probability in nats, whether every token is the most likely one) for a continuation.

    scores: log-probabilities of the next token, (tokens of a window, vocabulary); the last len(ids) rows belong to the
    continuation. ids: the tokens of the continuation. Raises UserError if the window has fewer tokens."""
    if len(ids) > len(scores):
        raise UserError(
            f"an answer of a task has {len(ids)} tokens, but a window only {len(scores)}; set a larger --seq_length"
        )
    own = scores[-len(ids) :]
    wanted = torch.tensor(ids, device=own.device)
    nats = own.gather(1, wanted[:, None]).sum()
    return float(nats), own.argmax(-1).equal(wanted)


def pad_rows(rows: list, filler: int) -> torch.Tensor:
    """Returns one tensor of token ids on the device, with the shape (number of rows, length of the longest row).
    Shorter rows end in the filler."""
    tensors = [torch.tensor(row) for row in rows]
    return pad_sequence(tensors, True, filler).to(inference_world().device)


def collect_answers(
    steps: Iterable[torch.Tensor],
    lengths: list[int],
    max_tokens: int,
    stops: list[str],
    tokenizer: Any,
) -> list[list[int]]:
    """Returns the tokens of each answer. An answer ends when its text contains one of `stops`, or after `max_tokens`.

    steps: the output of `generate`, the tokens of all rows for each position after the shortest prompt. lengths: the
    number of tokens in each prompt."""
    answers: list[list[int]] = [[] for _ in lengths]
    unfinished = set(range(len(lengths)))
    for position, step in enumerate(steps, start=min(lengths)):
        for row in [row for row in unfinished if position >= lengths[row]]:
            answers[row].append(int(step[row]))
            text = tokenizer.decode(answers[row][-STOP_SEARCH_TOKENS:])
            if len(answers[row]) == max_tokens or any(stop in text for stop in stops):
                unfinished.remove(row)
        if not unfinished:
            break
    return answers


def find_tasks(names: list[str], include_path: str) -> TaskManager:
    """Returns a TaskManager of lm-eval that knows these tasks. include_path: a folder with additional task files, or
    "".

    Raises UserError for an unknown task, for a missing folder, and if there are several ranks."""
    if inference_world().size > 1:
        raise UserError("--tasks runs in one process; start it without torchrun")
    if not is_folder(include_path):  # the empty path counts as a folder
        raise UserError(f"--include_path={include_path}: there is no such folder")
    with task_errors_as_user_errors():
        manager = TaskManager(include_path=include_path)
    for name in names:
        if name not in manager.all_tasks:
            hint = suggest_name(name, manager.all_tasks, "lm_eval ls tasks lists lm-eval's own")
            raise UserError(
                f"--tasks={name}: there is no such task in lm-eval, and no valid file in --include_path defines it; {hint}"
            )
    return manager


def run_tasks(
    model: MambaFSDP, manager: TaskManager, names: list[str], num_fewshot: int, limit: int
) -> dict[str, Any]:
    """Runs the tasks, and returns the results of lm-eval. num_fewshot: the number of examples in the context; -1: the
    default of each task. limit: the number of questions of each task, from the first; 0: all. Raises UserError for a
    task that lm-eval can't run."""
    with task_errors_as_user_errors():
        return simple_evaluate(
            model=model,
            tasks=names,
            task_manager=manager,
            num_fewshot=num_fewshot if num_fewshot >= 0 else None,
            limit=limit or None,
            log_samples=False,
        )


@contextlib.contextmanager
def task_errors_as_user_errors() -> Iterator[None]:
    """Turns exceptions of lm-eval into UserErrors. Typical causes are data that can't be downloaded, a missing package,
    or a mistake in the user's own task file, so any type of exception is possible. A RuntimeError is passed on,
    because torch has raised it."""
    try:
        yield
    except (UserError, RuntimeError):
        raise
    except Exception as error:
        raise UserError(
            f"--tasks: lm-eval stopped with {type(error).__name__}: {first_line(error)}; check your own task files, the "
            "packages that the tasks need, and the access to their data"
        ) from error
