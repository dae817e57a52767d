"""python -m mamba_fsdp selfcheck

Import everything, show which form serves each operator, train one step on the CPU and, where there is one, on a GPU,
print the versions. The last step of the image's build, and the first thing to run where an environment is in doubt.
Exits with 1 and the reason when something is missing or does not work.
"""

import importlib.util
import pkgutil
import platform
import sys
import traceback
from importlib import metadata
from itertools import chain

import mamba_fsdp

PACKAGES = ("torch", "triton", "transformers", "tokenizers", "datasets", "pyarrow", "numpy", "safetensors", "fire",
            "yaml", "zstandard", "tqdm", "matplotlib", "einops", "causal_conv1d", "mamba_ssm")  # as they are imported
OPTIONAL = {"triton", "einops", "causal_conv1d", "mamba_ssm"}  # they serve GPUs only


def main() -> int:
    print(f"Python {platform.python_version()}, {platform.platform()}")
    steps = [(check_package, name) for name in PACKAGES] + [(check_project,), (check_devices,)]
    failed = False
    for step, *arguments in steps:
        try:
            print(step(*arguments), flush=True)
        except Exception as error:  # an import can fail in any way, and every failure belongs into the report
            where = traceback.extract_tb(error.__traceback__)[-1]
            print(f"error: {' '.join([step.__name__, *arguments])}: {type(error).__name__}: {error} "
                  f"({where.filename}:{where.lineno})", file=sys.stderr, flush=True)
            failed = True
    return 1 if failed else 0


def check_package(name: str) -> str:
    """Import a package; returns a line with its version. Raises what the import raises."""
    installed = {"yaml": "PyYAML"}.get(name, name.replace("_", "-"))
    try:
        version = metadata.version(installed)
    except metadata.PackageNotFoundError:
        if name not in OPTIONAL:
            raise
        return f"  {installed:<14} not installed"
    module = importlib.import_module(name)
    more = ""
    if name == "torch":
        cuda = f"CUDA {module.version.cuda}, {module.cuda.device_count()} GPUs here"
        more = f" ({cuda})" if module.version.cuda else " (without CUDA)"
    if name == "triton":
        from triton.runtime.cache import get_cache_manager

        more = f" ({type(get_cache_manager('00' * 32)).__name__})"  # Rank0CacheManager: see patches/
    return f"  {installed:<14} {version}{more}"


def check_project() -> str:
    """Import the scripts and every module of the library that this torch can have; returns a line with their number."""
    from mamba_fsdp.parallel.compat import HAS_FSDP2

    names = {module.name for module in pkgutil.walk_packages(mamba_fsdp.__path__, "mamba_fsdp.")}
    names -= {"mamba_fsdp.__main__"} | (set() if HAS_FSDP2 else {"mamba_fsdp.parallel.fsdp2"})
    names |= {"training", "get_dataset"}
    if importlib.util.find_spec("triton") is None:  # modules of kernels import it
        names = {name for name in names if not name.rpartition(".")[2].startswith("triton_")}
    for name in sorted(names):
        importlib.import_module(name)
    return f"  {'this project':<14} {len(names)} modules"


def check_devices() -> str:
    """Choose each operator's form on the devices here and train a step on them; returns a table that also says what
    keeps better forms away, and lines that say how the loss moved."""
    import torch

    devices = {"cpu": torch.float32} | ({"cuda": torch.bfloat16} if torch.cuda.is_available() else {})
    found = [[*_forms_on(device, dtype), _step_on(device)] for device, dtype in devices.items()]
    return "\n".join(chain.from_iterable(found))


def _forms_on(device, dtype):
    from config.model_config import ModelConfig
    from mamba_fsdp.model.spec import operator_uses
    from mamba_fsdp.ops.forms import resolve_forms

    config = ModelConfig(layers="mamba1,mamba2,attention", d_model=1024)
    choice = resolve_forms("auto", device, operator_uses(config, dtype))
    yield f"operators on {device}, {dtype}"
    for operator, passed in choice.passed.items():
        why = "; ".join(f"not {form}: {reason}" for form, reason in passed.items())
        yield f"  {operator:<14} {choice.forms.get(operator, 'by its parts'):<14} {why}".rstrip()


def _step_on(device):
    import torch

    from config.model_config import ModelConfig
    from mamba_fsdp.model.init import initial_value
    from mamba_fsdp.model.lm import MambaLM
    from mamba_fsdp.model.spec import operator_uses, parameters
    from mamba_fsdp.ops.forms import resolve_forms

    config = ModelConfig(d_model=64, n_layer=2, layers="mamba1,mamba2", vocab_size=256, d_state=16, headdim=16)
    model = MambaLM(config, forms=resolve_forms("auto", device, operator_uses(config, torch.float32)).forms)
    with torch.no_grad():
        for (name, described), parameter in zip(parameters(config).items(), model.parameters()):
            parameter.copy_(initial_value(name, described, 0))
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.arange(2 * 64, device=device).reshape(2, 64)
    before = model(tokens[:, :-1], labels=tokens[:, 1:]) / tokens[:, 1:].numel()
    before.backward()
    optimizer.step()
    after = model(tokens[:, :-1], labels=tokens[:, 1:]) / tokens[:, 1:].numel()
    if not after < before:
        raise RuntimeError(f"a training step on {device} did not lower the loss: {before:.4f}, then {after:.4f}")
    return f"one training step on the {'GPU' if device == 'cuda' else 'CPU'}: loss {before:.4f}, then {after:.4f}"
