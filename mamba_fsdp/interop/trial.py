"""Tests an export with the installed transformers before the output folder appears.

The class that config.json names is built with the sizes of the export on the meta device, without memory for its weights. In
addition, a small model with random weights and one layer of each kind is exported in the same way. The class has to load it,
compute the same logits as the model of this program, and generate with and without its cache.

A table of minimal versions can't replace this test. For example, BambaForCausalLM of transformers 5.0 to 5.14 gives other
results than in 4.57 and 5.23 if rotary positions apply to a part of each head only.
"""

import contextlib
import math
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mamba_fsdp.checkpoint.tensors import TensorSource
from mamba_fsdp.errors import UserError, first_line
from mamba_fsdp.interop.architectures import Architecture
from mamba_fsdp.interop.weights import Description, Weights
from mamba_fsdp.model.config import ModelConfig
from mamba_fsdp.model.init import initial_values
from mamba_fsdp.model.lm import MambaLM
from mamba_fsdp.model.spec import parameter_count, parameters

# Before transformers 5, these classes normalize the output of Mamba-2 over all groups together.
GROUPED_SINCE_5 = ("Mamba2ForCausalLM", "BambaForCausalLM", "GraniteMoeHybridForCausalLM")
# Before transformers 5, this class gives wrong results on a CPU for a batch of several prompts with a cache.
ONE_PROMPT_BEFORE_5 = "FalconH1ForCausalLM"
VOCABULARY = 64  # vocabulary size of the small model
PROMPT = 11  # the number of tokens in the prompt; larger than CHUNK
CHUNK = 8
NEW_TOKENS = 5
PAD = 0
# The maximal difference of a logit, as a fraction of the largest one. The rounding errors of fused kernels are larger than
# those of plain fp32 operations.
TOLERANCE = 0.02
UNTRIED = "--trial=false writes it without this test, --format=pth writes this program's own format"

WriteHf = Callable[[Path, Weights], None]


class SampleTensors(TensorSource):
    """Random weights of a model. All elements of a tensor differ, so that exchanged elements change the results."""

    def __init__(self, config: ModelConfig):
        self.source = Path()
        self.parameters = parameters(config)
        self.shapes = {name: parameter.shape for name, parameter in self.parameters.items()}

    def slice(self, name: str, start: int, stop: int) -> Tensor:
        size = self.parameters[name].size
        initial = initial_values(name, self.parameters[name], 0, start, stop)
        return initial * torch.linspace(0.8, 1.2, size)[start:stop]


def try_export(
    folder: Path, architecture: Architecture, config: ModelConfig, write: WriteHf
) -> str:
    """Tests the export in `folder` with transformers. Returns a message with the result, or with the reason why the export
    could not be tested.

    config: the exported model. write: a function that writes weights as an export. Raises UserError if the class can't use
    the export."""
    try:
        import transformers  # imported here because the import takes seconds
    except ImportError as error:
        return f"not tried: transformers can't be imported ({first_line(error)})"
    version = f"transformers {transformers.__version__}"
    class_name = architecture.class_name
    if not hasattr(transformers, class_name):
        return f"not tried: it needs a newer transformers with {class_name}; the installed one is {version}"
    is_before_5 = int(transformers.__version__.split(".")[0]) < 5
    is_grouped = config.has_mixer("mamba2") and config.ngroups > 1
    if is_before_5 and is_grouped and class_name in GROUPED_SINCE_5:
        return (
            f"not tried: it needs transformers 5 or newer; the installed {version} gives other results with "
            f"ngroups={config.ngroups}"
        )
    action = "building the model"
    try:
        with _quiet(transformers):
            _build(transformers, folder, config)
            for step in _use(transformers, small_copy(config), write):
                action = step
    except Exception as error:  # the library can raise any exception
        raise UserError(
            f"{class_name} of {version} can't use this export: {action} failed with {type(error).__name__} "
            f"({first_line(error)[:200]}); {UNTRIED}"
        ) from error
    message = f"tried: {class_name} of {version} loads it, gives the same results and generates"
    if is_before_5 and class_name == ONE_PROMPT_BEFORE_5:
        message += "; give it one prompt at a time, because before transformers 5 it gives wrong results for several"
    return message


def small_copy(config: ModelConfig) -> ModelConfig:
    """Returns a small model of the same structure: one layer of each kind, but at least two layers, and small sizes. The sizes
    of heads are kept. If the attention heads of the model together have d_model channels, the heads of the small model also
    do."""
    layers = dict.fromkeys(layer.name for layer in config.layer_list())
    group = config.headdim * config.ngroups
    queries = config.n_head // config.n_kv_head
    heads_fill = config.n_head * config.resolved_head_dim == config.d_model
    unit = queries * config.resolved_head_dim if heads_fill else config.n_head
    sizes: dict[str, Any] = {"d_model": min(config.d_model, math.lcm(group, unit))}
    if heads_fill:
        sizes["n_kv_head"] = sizes["d_model"] // unit
        sizes["n_head"] = sizes["n_kv_head"] * queries
    if config.d_inner % config.d_model:
        sizes["d_ssm"] = min(config.d_inner, 2 * group)
    else:
        sizes |= {"d_ssm": 0, "expand": config.d_inner // config.d_model}
    return replace(
        config,
        layers=",".join(layers),
        n_layer=max(2, len(layers)),
        vocab_size=VOCABULARY,
        pad_vocab_size_multiple=1,
        head_dim=config.resolved_head_dim,
        dt_rank=config.resolved_dt_rank,
        d_intermediate=min(config.resolved_d_intermediate, 64),
        chunk_size=CHUNK,
        **sizes,
    )


def _build(transformers: Any, folder: Path, config: ModelConfig) -> None:
    described = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(described)
    count = sum(parameter.numel() for parameter in model.parameters())
    if count != parameter_count(config):
        raise ValueError(f"the model has {count:,} parameters, not {parameter_count(config):,}")


def _use(transformers: Any, config: ModelConfig, write: WriteHf) -> Iterator[str]:
    """Exports and uses a model. Yields a description of each action before it begins.

    Raises ValueError if the results differ from those of this program, and any exception of transformers."""
    weights = Weights(Path(), Description(config), None)
    weights.tensors = SampleTensors(config)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    yield "loading"
    with tempfile.TemporaryDirectory() as place:
        write(Path(place), weights)
        theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
            place, output_loading_info=True
        )
    for kind in ("missing_keys", "unexpected_keys"):
        if report[kind]:
            raise ValueError(f"{kind}: {', '.join(sorted(report[kind]))}")
    theirs = theirs.eval().to(device)
    ours = MambaLM(config)
    tokens = (torch.arange(PROMPT) + PAD + 1)[None].to(device)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.copy_(weights.get(name))
        for use_cache in (False, True):
            how = "with a cache" if use_cache else "without a cache"
            yield f"a forward pass {how}"
            _check_logits(theirs(tokens, use_cache=use_cache).logits, ours(tokens.cpu()))
            yield f"generating {how}"
            found = theirs.generate(
                tokens,
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                use_cache=use_cache,
                pad_token_id=PAD,  # a token that the prompt does not contain
                output_logits=True,
                return_dict_in_generate=True,
            )
            expected = ours(found.sequences[:, :-1].cpu())[:, PROMPT - 1 :]
            _check_logits(torch.stack(found.logits, 1), expected)


def _check_logits(found: Tensor, expected: Tensor) -> None:
    error = (found.cpu() - expected).abs().max() / expected.abs().max()
    if not error < TOLERANCE:
        raise ValueError(f"the logits differ by {error:.1%} from those of this program")


@contextlib.contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Prevents transformers from printing advice and progress inside the block."""
    logging = transformers.utils.logging
    verbosity = logging.get_verbosity()
    had_progress = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if had_progress:
            logging.enable_progress_bar()
