"""A trained model with its tokenizer, from whatever names one: a run, a checkpoint, a .pth file, another library's folder."""

import torch

from mamba_fsdp.errors import UserError
from mamba_fsdp.interop.weights import read_weights
from mamba_fsdp.model.lm import MambaLM
from mamba_fsdp.ops import kernels
from mamba_fsdp.parallel.shards import fill, whole


def load_model(source, *, device="auto", kernel_setting="auto", reset_at_documents=False):
    """(MambaLM in fp32, or bf16 arithmetic on a GPU, ready for inference; the Weights it came from). Raises UserError."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_flush_denormal(True)
    weights = read_weights(source)
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    with torch.device("meta"):
        model = MambaLM(weights.config, kernels=kernels.resolve(kernel_setting, torch.device(device).type), compute_dtype=dtype,
                        reset_at_documents=reset_at_documents)
    model.to_empty(device=device)
    fill(whole(model), lambda name, shape: weights.get(name))
    return model.eval().requires_grad_(False), weights


def load_tokenizer(weights, named=""):
    """The tokenizer that came with the weights, or the one named. Raises UserError where there is none."""
    path = named or weights.tokenizer_path
    if not path:
        raise UserError(f"{weights.source} came without a tokenizer; name one: --tokenizer=PATH")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise UserError(f"tokenizer {path}: can't be loaded ({str(error).splitlines()[0]})") from None
