"""The ready runs in config/: each resolves, is the model that it names, fits on a few of AWS's machines, and runs as it is
written but for its size."""

import pytest
import torch

from config.resolve import ready_runs, resolve_settings
from mamba_fsdp.model.lm import MambaLM
from mamba_fsdp.model.spec import parameter_count
from mamba_fsdp.planning.devices import INSTANCES
from mamba_fsdp.planning.estimate import estimate

SMALL = {
    "d_model": 16,
    "n_layer": 2,
    "vocab_size": 64,
    "d_state": 4,
    "seq_length": 32,
    "batch_size": 2,
    "global_batch_size": 4,
    "mixed_precision": "fp32",
    "eval_batches": 1,
    "num_workers": 0,
}


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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wikitext103", "mamba-2.8b"])
def test_they_run_on_a_small_corpus(name, corpus, tmp_path, capsys):
    """WikiText's from scratch by epochs, then from the weights that this gave, as from published ones."""
    from mamba_fsdp.interop.convert import publish
    from mamba_fsdp.train.run import run_training
    from mamba_fsdp.verbs.loading import starting_weights

    def run(folder, **given):
        words = {"dataset_path": corpus, "save_ckpt_path": tmp_path / folder, **SMALL, **given}
        settings, explicit = resolve_settings(
            {key: str(value) for key, value in words.items()}, name
        )
        run_training(settings, starting_weights(settings, explicit), write_model=publish)
        return capsys.readouterr().out

    length = (
        {"num_epochs": 0.05}
        if name == "wikitext103"
        else {"num_steps": "640tok", "warmup_steps": "256tok"}
    )
    assert "everything lies in" in run("scratch", **length)
    said = run("tuned", init_from=tmp_path / "scratch", learning_rate=1e-4, **length)
    assert "from the weights in" in said and "everything lies in" in said
