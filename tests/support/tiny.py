"""The settings of a run that takes a second, and settings from words."""

from mamba_fsdp.settings.resolve import resolve_settings

TINY = {
    "d_model": 16,
    "n_layer": 2,
    "vocab_size": 64,
    "d_state": 4,
    "seq_length": 32,
    "batch_size": 2,
    "num_steps": 6,
    "mixed_precision": "fp32",
    "learning_rate": 0.01,
    "eval_interval": 3,
    "eval_batches": 2,
    "report_interval": 1,
    "checkpoint_interval": 2,
    "kernels": "reference",
}


def as_words(settings):
    """As they stand on a command line."""
    return [f"--{name}={value}" for name, value in settings.items()]


def resolved(file=None, **given):
    """The settings of a run, of these as a user writes them."""
    words = {name: str(value) for name, value in given.items()}
    return resolve_settings(words, file)


def model_config(text):
    """The ModelConfig of settings as a user types them: `name=value name=value`."""
    return resolve_settings(dict(word.split("=", 1) for word in text.split())).model
