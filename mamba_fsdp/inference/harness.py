"""Runs our models in lm-evaluation-harness (lm-eval), which has to be installed.

pyproject.toml declares MambaFSDP as a plugin of lm-eval: a release that looks for plugins takes
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
from mamba_fsdp.inference.loading import inference_world, load
from mamba_fsdp.storage.patience import is_folder
from mamba_fsdp.text import suggest_name

TAIL = 64  # newest tokens of an answer, in which the texts that end it are searched


class MambaFSDP(TemplateLM):
    """A model for lm-eval: whatever `load` takes, with the run's own kernels on a GPU.

    It answers as lm-eval's hf model answers for the model's export. A context that does not fit into a window of
    max_length tokens loses its beginning.
    """

    def __init__(
        self,
        pretrained: str | Path,
        tokenizer: str = "",
        max_length: int = 2048,
        batch_size: int = 8,
        model_name: str = "",
        device: str = "",
        **others: Any,
    ) -> None:
        """Loads the model. The arguments have the names of lm-eval's hf model. pretrained, model_name: as for `load`.
        tokenizer: its path, if the model has none. batch_size: the most texts in a forward pass. device: if given, the
        kind of device that `load` takes. Raises UserError, also for other arguments."""
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
                f"the tokenizer has {len(self.tokenizer):,} tokens, more than the model: name the model's own"
            )
        self.max_length = max_length
        self.batch_size = int(batch_size)

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """Returns the token before a text without context."""
        if self.tokenizer.bos_token is None:
            return self.eot_token_id
        return self.tokenizer.bos_token_id

    def tok_encode(self, text: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens is not False)

    @torch.no_grad()
    def _loglikelihood_tokens(self, requests: list[tuple], **_: Any) -> list[tuple[float, bool]]:
        """Returns (log-probability in nats, whether each token is the likeliest) of each continuation. requests:
        (anything, context ids, continuation ids). A context that several of them share is read once."""
        collator = Collator(
            requests,
            lambda ask: -len(ask[1] + ask[2]),  # the longest first
            lambda ask: ask[1] + ask[2][:-1],  # what the model reads
            "contexts",
        )
        answers = []
        for batch in tqdm(list(collator.get_batched(self.batch_size))):
            rows = [(context + ids)[-self.max_length - 1 : -1] for _key, context, ids in batch]
            hidden = self.network.final_norm(*self.network.run_blocks(padded(rows, 0)))
            for request, row, states in zip(batch, rows, hidden):
                scored = states[: len(row)][-len(request[2]) :]
                scores = self.network.lm_head(scored).float().log_softmax(-1)
                for _key, ids, _scores in collator.get_cache(*request, scores[None]):
                    answers.append(judged(scores, ids))
        return collator.get_original(answers)

    def loglikelihood_rolling(self, requests: list[Any], **_: Any) -> list[float]:
        """Returns the log-probability of each text in nats: each token once, in windows of max_length tokens."""
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
        """Returns the text that continues each prompt, up to the first of the texts at which its task stops."""
        asked = [(self.tok_encode(request.args[0]), request.args[1]) for request in requests]
        collator = Collator(asked, lambda ask: -len(ask[0]), lambda ask: ask[1], "gen_kwargs")
        texts = []
        for batch in tqdm(list(collator.get_batched(self.batch_size))):
            settings: Any = normalize_gen_kwargs(batch[0][1])
            texts += self.continued([ids for ids, _settings in batch], **settings)
        return collator.get_original(texts)

    def continued(
        self, prompts: list, until: list, max_gen_toks: int, do_sample: bool, **settings: Any
    ) -> list[str]:
        """Returns the texts of at most max_gen_toks tokens. settings: as for `generate`. Raises UserError for others."""
        unknown = settings.keys() - {"temperature", "top_k", "top_p"}
        if unknown:
            raise UserError(
                f"a task asks for {', '.join(unknown)}: generation has temperature, top_k, top_p"
            )
        room = self.max_length - max_gen_toks
        if room < 1:
            raise UserError(
                f"a task asks for {max_gen_toks} tokens: --seq_length={self.max_length} must leave room for a prompt"
            )
        settings.setdefault("temperature", float(do_sample))
        prompts = [ids[-room:] or [self.prefix_token_id] for ids in prompts]
        steps = generate(self.network, padded(prompts, -1), length=max_gen_toks, **settings)
        stops = [stop for stop in [*until, self.tokenizer.eos_token] if stop]
        answers = answers_of(
            steps, [len(ids) for ids in prompts], max_gen_toks, stops, self.tokenizer
        )
        texts = self.tokenizer.batch_decode(answers, skip_special_tokens=True)
        return [postprocess_generated_text(text, stops, None) for text in texts]


def judged(scores: torch.Tensor, ids: list[int]) -> tuple[float, bool]:
    """Returns (log-probability in nats, whether each token is the likeliest) of an answer. scores: log-probabilities
    (tokens of a window, vocabulary) of the next token; the last ones are the answer's. Raises UserError if it is longer."""
    if len(ids) > len(scores):
        raise UserError(f"an answer has {len(ids)} tokens, a window {len(scores)}")
    own = scores[-len(ids) :]
    wanted = torch.tensor(ids, device=own.device)
    nats = own.gather(1, wanted[:, None]).sum()
    return float(nats), own.argmax(-1).equal(wanted)


def padded(rows: list, filler: int) -> torch.Tensor:
    """Returns token ids (rows, longest), on the device, with the filler after the shorter rows."""
    tensors = [torch.tensor(row) for row in rows]
    return pad_sequence(tensors, True, filler).to(inference_world().device)


def answers_of(
    steps: Iterable[torch.Tensor], lengths: list[int], most: int, stops: list[str], tokenizer: Any
) -> list[list[int]]:
    """Returns the tokens of each answer, at most `most`, up to the first text of `stops`. steps: of each position from the
    shortest prompt's end on, the token of each row. lengths: tokens of the prompts."""
    answers: list[list[int]] = [[] for _ in lengths]
    unfinished = set(range(len(lengths)))
    for position, step in enumerate(steps, start=min(lengths)):
        for row in [row for row in unfinished if position >= lengths[row]]:
            answers[row].append(int(step[row]))
            text = tokenizer.decode(answers[row][-TAIL:])
            if len(answers[row]) == most or any(stop in text for stop in stops):
                unfinished.remove(row)
        if not unfinished:
            break
    return answers


def find_tasks(names: list[str], include_path: str) -> TaskManager:
    """Returns lm-eval's manager, which has these tasks. include_path: a folder of further task files, or "". Raises
    UserError for an unknown task."""
    if inference_world().size > 1:
        raise UserError("--tasks runs in one process: leave torchrun out")
    if not is_folder(include_path):  # an empty path is the current folder
        raise UserError(f"--include_path={include_path}: there is no such folder")
    with mistakes_of_tasks():
        manager = TaskManager(include_path=include_path)
    for name in names:
        if name not in manager.all_tasks:
            hint = suggest_name(name, manager.all_tasks, "lm_eval ls tasks lists lm-eval's own")
            raise UserError(
                f"--tasks={name}: neither lm-eval nor a file in --include_path that it can read has it; {hint}"
            )
    return manager


def run_tasks(
    model: MambaFSDP, manager: TaskManager, names: list[str], num_fewshot: int, limit: int
) -> dict[str, Any]:
    """Returns lm-eval's results of the tasks. num_fewshot: -1 for each task's own number. limit: the first questions of
    each task; 0 for all. Raises UserError for a task that lm-eval can't run."""
    with mistakes_of_tasks():
        return simple_evaluate(
            model=model,
            tasks=names,
            task_manager=manager,
            num_fewshot=num_fewshot if num_fewshot >= 0 else None,
            limit=limit or None,
            log_samples=False,
        )


@contextlib.contextmanager
def mistakes_of_tasks() -> Iterator[None]:
    """Raises UserError if lm-eval stops: data that can't be downloaded, a task that needs a further package, or a wrong
    file of the user's own, which can raise any exception. A RuntimeError is torch's and is not changed."""
    try:
        yield
    except (UserError, RuntimeError):
        raise
    except Exception as error:
        raise UserError(
            f"--tasks: lm-eval stopped at {type(error).__name__}: {first_line(error)}"
        ) from error
