"""A file of another launcher becomes YAML of ours that says what it said, and names what has no counterpart."""

import pytest

from config import resolve
from config.bring import brought
from config.elsewhere import LAUNCHERS
from mamba_fsdp.errors import UserError
from tests.support.their_files import COMPOSER, TRAINER, script

FILES = {
    "aws": ("a.sbatch", script("aws")),
    "fms": ("train.sh", script("fms")),
    "composer": ("c.yaml", COMPOSER),
    "trainer": ("t.yaml", TRAINER),
}
MEANT = {
    "aws": {
        "model_name": "state-spaces/mamba-130m",
        "num_steps": "1200",
        "seq_length": 4096,
        "grad_clip_thresh": 4.0,
        "keep_checkpoints": 1000,
        "fsdp_activation_checkpointing": True,
    },
    "fms": {
        "model_name": "mamba_9.8b",
        "datasets": ["lang=en/dataset=commoncrawl", "lang=en/dataset=arxiv"],
        "weights": [3.0, 1.0],
        "use_torch_compile": True,
        "vocab_size": 128256,
        "save_ckpt_path": "/fsx/output/ckpt",
    },
    "composer": {
        "tie_embeddings": False,
        "d_model": 2688,
        "batch_size": 7,
        "global_batch_size": 896,
        "schedule": "wsd",
        "schedule_steps": "10068787200tok",
        "num_steps": "10068787200tok",
        "dataset_path": "/fsx/mamba-v1",
        "datasets": ["book.train.gig.npy", "c.train.gig.npy"],
        "weights": [0.6, 0.4],
        "position_weighting": True,
        "tracker": ["wandb"],
        "wandb_project": "mamba-science",
    },
    "trainer": {
        "num_epochs": 5.0,
        "gradient_accumulation_steps": 8,
        "mixed_precision": "bf16",
        "seq_length": 2048,
        "tracker": ["tensorboard", "wandb"],
        "warmup_steps": "1000",
        "sharding_strategy": "ddp",
    },
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_file_is_brought_here(launcher, tmp_path):
    name, text = FILES[launcher]
    (tmp_path / name).write_text(text)
    ours = tmp_path / "ours.yaml"
    ours.write_text(brought(launcher, str(tmp_path / name)))
    settings, explicit = resolve.resolve_settings({}, str(ours))
    written = {
        key: value
        for section in resolve.as_dict(settings).values()
        for key, value in section.items()
    }
    assert {key: written[key] for key in MEANT[launcher]} == MEANT[
        launcher
    ] and settings.notes == []
    given = (
        resolve.flatten(resolve.load_yaml(tmp_path / name), name)
        if name.endswith("yaml")
        else [
            word.partition("=")[0]
            for word in text.replace("--", " --").split()
            if word.startswith("--")
        ]
    )
    said = ours.read_text().replace("-", "_")
    lost = {key for key in given if key.rpartition(".")[2].strip("-").replace("-", "_") not in said}
    assert lost <= {
        "training.per_device_train_batch_size",
        "use_wandb",
        "training.fp16",
        "trainer.save_interval",
        "data.text_paths",
        "--nodes",
    }, "said by another line, with the same value"


def test_a_brought_file_that_is_none_is_refused(tmp_path):
    for arguments, message in (
        (("megatron", "x"), "choose one of aws, fms, composer, trainer"),
        (("composser", "x"), "did you mean composer?"),
        (("fms", ""), "there is no file (give one)"),
        (("fms", str(tmp_path)), "there is no file"),
    ):
        with pytest.raises(UserError) as caught:
            brought(*arguments)
        assert message in str(caught.value)


def test_a_variable_of_the_shell_is_asked_for(tmp_path):
    file = tmp_path / "train.sh"
    file.write_text(
        "torchrun --nnodes=$N train.py --seq_length=$LENGTH --batch_size 3 --resuming_dataset=False\n"
        "  --ckpt_save_path='runs/a b' # --seed=7\n"
    )
    text = brought("fms", str(file))
    assert "# seq_length=$LENGTH holds a variable of the shell" in text and "seed" not in text
    assert (
        "batch_size: 3\n" in text
        and "save_ckpt_path: runs/a b" in text
        and "# nnodes=$N changes nothing" in text
    )
