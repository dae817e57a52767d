"""Tests from which files a run starts: its own checkpoint, other weights, or none, also if some of them are
missing."""

import shutil
import tempfile
from pathlib import Path

import pytest
import torch
import transformers
import yaml

import mamba_fsdp
from mamba_fsdp.errors import UserError
from mamba_fsdp.interop.convert import write_model
from mamba_fsdp.interop.weights import read_weights
from mamba_fsdp.run.records import read_status
from mamba_fsdp.trainer.run_folder import RunFolder
from tests.support.small_models import model_of

TESTS = Path(__file__).parents[1]
TRANSFORMERS_5 = int(transformers.__version__.split(".")[0]) >= 5


def test_load_ckpt_path_can_be_the_run_folder(train, tmp_path, monkeypatch):
    """load_ckpt_path can be the run folder itself, as many launchers pass it, also with resuming_dataset=true. The
    run resumes if there is a checkpoint, and otherwise starts from random weights."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("run")
    given = {"load_ckpt_path": f"../{tmp_path.name}/link/", "resuming_dataset": True}
    assert "steps " in train("run", dry_run=True, **given) and not (tmp_path / "run").exists()
    assert "starting   from random weights" in train("run", num_steps=1, **given)
    printed = train("run", num_steps=2, **given)
    assert "resumes    from run/checkpoints/step_00000001, step 1\n" in printed
    assert "starting" not in printed


@pytest.mark.parametrize("setting", [None, "init_from"])
def test_a_start_that_waited_for_another_one_resumes_from_its_checkpoint(
    train, tmp_path, monkeypatch, setting
):
    """If two starts of a run are simultaneous, the second one finds no checkpoint and waits until the first one has
    trained to its end. It then resumes from the last checkpoint of the first one."""
    recipe = {"recipe": "published"}  # the default if init_from is given
    train(tmp_path / "first", num_steps=2, **recipe)

    def acquire(folder, real=RunFolder.acquire):
        shutil.copytree(tmp_path / "first/checkpoints", folder.path / "checkpoints")
        real(folder)

    monkeypatch.setattr(RunFolder, "acquire", acquire)
    origin = {setting: tmp_path / "first"} if setting else {}
    printed = train(tmp_path / "run", num_steps=2, **recipe, **origin)
    assert "resumes    from " in printed and "run/checkpoints/step_00000002, step 2" in printed


def test_checkpoints_on_another_disk_than_the_run_are_refused(train, tmp_path):
    """If the folder `checkpoints` is on another disk than the run, an error is raised, because a rename can't move
    checkpoints to another disk."""
    (tmp_path / "run").mkdir()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        (tmp_path / "run/checkpoints").symlink_to(other)
        with pytest.raises(UserError, match="checkpoints is on another disk"):
            train(tmp_path / "run", num_steps=1)


def empty(folder):
    """Empties a folder, like a program that cleans a scratch disk."""
    shutil.rmtree(folder)
    folder.mkdir()


@pytest.mark.parametrize(
    ("setting", "remove"), [("init_from", shutil.rmtree), ("load_ckpt_path", empty)]
)
def test_the_origin_of_a_run_can_be_removed(train, tmp_path, setting, remove):
    """After its first start, a run resumes from its own checkpoint, even if the weights it started from have been
    removed.

    The model has the shape of the existing weights, and settings of another shape are an error.
    """
    train(tmp_path / "first", num_steps=1, expand=4)
    origin = tmp_path / "first"
    if setting == "init_from":
        origin = next((tmp_path / "first/pth").iterdir())
    with pytest.raises(UserError, match=rf"{origin}.* another model .*expand=1 \(there 4\); leave"):
        train(tmp_path / "run", num_steps=1, **{setting: origin}, expand=1)
    train(tmp_path / "run", num_steps=1, **{setting: origin})
    remove(origin)
    printed = train(tmp_path / "run", num_steps=2, **{setting: origin})
    assert f"step_00000001, step 1; {origin} was used for its first start only" in printed
    with pytest.raises(UserError, match=rf"{tmp_path}/run.* another model .*expand=1 \(there 4\)"):
        train(tmp_path / "run", num_steps=3, **{setting: origin}, expand=1)
    with pytest.raises(UserError, match=str(origin)):
        train(tmp_path / "other", num_steps=2, **{setting: origin})
    assert not (tmp_path / "other").exists()


@pytest.mark.torch22
def test_settings_that_the_shape_of_the_weights_excludes_are_refused(train, tmp_path):
    """Settings that the layers of the existing weights do not support are an error, even if the default model
    supports them."""
    train(tmp_path / "gdn", num_steps=1, layers="gdn", headdim=8)
    with pytest.raises(UserError, match="context_parallel=2: Gated DeltaNet .* leave it at 1"):
        train(tmp_path / "run", init_from=tmp_path / "gdn", context_parallel=2)
    assert read_status(tmp_path / "run")["status"] == "failed"


@pytest.mark.skipif(not TRANSFORMERS_5, reason="transformers 4 has no Nemotron-H")
def test_a_dense_nemotron_hybrid_is_imported_trained_on_and_exported(corpus, tmp_path):
    """A small Nemotron hybrid with the published pattern of layers can be imported, trained and exported, and its
    logits equal those of transformers. docs/models.md describes the same with the published model."""
    published = yaml.safe_load((TESTS / "interop/published.yaml").read_text())
    sizes = dict(
        hidden_size=32, intermediate_size=40, vocab_size=64, ssm_state_size=8, chunk_size=8
    )
    sizes |= dict(mamba_num_heads=6, mamba_head_dim=8, n_groups=2)
    sizes |= dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    # NVIDIA's code uses time_step_min only for initial values. It therefore has no effect on trained weights.
    sizes |= dict(time_step_min=1e-9)
    described = {**published["nemotron-3-nano-4b"]["config"], **sizes}
    original = transformers.NemotronHForCausalLM(transformers.NemotronHConfig(**described)).eval()
    original.save_pretrained(tmp_path / "original")

    def check_logits(expected, source):
        weights = read_weights(source)
        assert weights.config.n_layer == 42
        tokens = torch.randint(0, 64, (2, 30))
        with torch.no_grad():
            ours = model_of(weights.config, weights.get)(tokens)
            logits = expected(tokens, use_cache=False).logits
        torch.testing.assert_close(ours, logits, rtol=1e-4, atol=1e-4)

    check_logits(original, tmp_path / "original")
    mamba_fsdp.train(
        dataset_path=corpus,
        save_ckpt_path=tmp_path / "run",
        init_from=tmp_path / "original",
        seq_length=32,
        batch_size=2,
        num_steps=2,
    )
    write_model(tmp_path / "run", tmp_path / "exported")
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported").eval()
    assert type(exported) is type(original)
    check_logits(exported, tmp_path / "run")
    heads = [model.get_parameter("lm_head.weight") for model in (original, exported)]
    assert not torch.equal(*heads), "training changes the weights"
