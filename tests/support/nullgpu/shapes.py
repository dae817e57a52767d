"""Runs each kind of layer of the presets forward and backward on the null device, with the shapes of their recipes.

    python -m tests.support.nullgpu.shapes PRESET ...

The program fails if a launch exceeds a limit of the device.
"""

import sys

import torch

from mamba_fsdp.settings.resolve import resolve_settings
from mamba_fsdp.trainer.kernel_selection import KernelSelector


def main(presets):
    for name in presets:
        settings = resolve_settings({"model_name": name, "use_dummy_dataset": "true"})
        found = KernelSelector(settings, torch.device("cuda"), is_sharded=True)
        model = found.layers.make_model(found.layers.kinds, found.resolve().backends)
        found.layers.run(model, found.layers.shape)


if __name__ == "__main__":
    main(sys.argv[1:])
