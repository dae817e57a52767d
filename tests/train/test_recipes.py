"""The ready runs in config/: each resolves, is the model that it names, fits on a few of AWS's machines, and runs as it is
written but for its size."""

import pytest
import torch

from config.resolve import ready_runs, resolve_settings
from mamba_fsdp.model.lm import MambaLM
from mamba_fsdp.model.spec import parameter_count
from mamba_fsdp.planning.devices import INSTANCES
from mamba_fsdp.planning.estimate import estimate


def test_each_resolves_is_the_model_it_names_and_fits():
    names = ready_runs().keys()
    assert len(names) >= 17
    for name in names:
        settings, explicit = resolve_settings({}, name)
        with torch.device("meta"):
            built = sum(parameter.numel() for parameter in MambaLM(settings.model).parameters())
        assert built == parameter_count(settings.model) and "model_name" in explicit, name
        if name in ("mamba-130m", "mamba2-2.7b", "llama2_70b"):
            assert settings.model.model_name == name
            assert built == pytest.approx(
                {"130m": 0.13e9, "2.7b": 2.7e9, "70b": 69e9}[name[-4:].strip("_")], rel=0.02
            )
        nodes = 4 if "llama" in name else 1
        assert estimate(settings, nodes, INSTANCES["p4de.24xlarge"]).fits, name
