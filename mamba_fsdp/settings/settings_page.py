"""The help page of training.py, and of the other programs that accept the same settings."""

from mamba_fsdp.settings import other_launchers
from mamba_fsdp.settings.help import Page
from mamba_fsdp.settings.train_config import SECTIONS

OPENING = """
Train a Mamba language model. The same command again resumes it after a stop.

  ./1.train.sbatch [--config=FILE.yaml] [--SETTING=VALUE ...]   on all devices
  python training.py ...                                        on one device

--config takes a file or a ready run: demo, wikitext103, mambaoutai, bamba-9b,
nemotron-3-nano-4b.
--dry_run prints the model, the memory that it needs and where the run would
start, then exits. The command line overrides --config, --config overrides the
recipe of --model_name, and the recipe overrides the defaults, shown after the =
below. Numbers can be written 10k, 1.5M or 2B; a length is in steps (10k) or
tokens (2Btok). In YAML, write name: value.
"""
USUAL = (
    "model_name d_model n_layer dataset_path validation_path seq_length learning_rate schedule warmup_steps num_steps "
    "batch_size global_batch_size mixed_precision eval_interval save_ckpt_path init_from checkpoint_interval "
    "sharding_strategy fsdp_activation_checkpointing tracker"
)


def settings_page() -> Page:
    return Page(OPENING, SECTIONS, USUAL.split(), other_launchers.load_entries)
