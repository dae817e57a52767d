"""Settings that earlier versions had. The config.yaml of an older run names them, and is still read; whoever gives one
now is told what to do instead."""

from typing import NamedTuple


class Retired(NamedTuple):
    """A setting that is gone."""

    usual: str  # its default, as a config.yaml of that time has it
    instead: str  # what to do now


READ_BEFORE = (
    "training reads token stores; get_dataset.py makes one of other data and says how it is read "
    "(docs/data.md)"
)
SPIKES = (
    "steps that are not finite are skipped; to go back before a spike, begin another run folder with "
    "load_ckpt_path=RUN/checkpoints/STEP"
)
ONE_TIER = (
    "checkpoints lie in the run folder alone and are written while training continues; a smaller "
    "checkpoint_interval saves more often"
)
ALWAYS_SO = "it has one right value, which is always taken"

RETIRED = {
    "loss_spike_factor": Retired("0.0", SPIKES),
    "loss_spike_skip": Retired("false", SPIKES),
    "sample_log": Retired("false", "the order of the samples is computed, and needs no log"),
    "new_epoch": Retired(
        "false", "another run folder with load_ckpt_path=RUN begins the data anew"
    ),
    "lengthened": Retired(
        "auto",
        "a longer run keeps to its learning rate's schedule and stays where that ends; "
        "schedule_steps=N gives it another",
    ),
    "kernel_cache": Retired(
        "auto",
        "TRITON_CACHE_DIR and TORCHINDUCTOR_CACHE_DIR in the environment say where compiled kernels stay",
    ),
    "tune_kernels": Retired("false", "the kernels take the block sizes known for the GPU"),
    "local_checkpoint_path": Retired("", ONE_TIER),
    "local_checkpoint_interval": Retired("50", ONE_TIER),
    "reentrant_checkpointing": Retired("false", ALWAYS_SO),
    "limit_all_gathers": Retired("true", ALWAYS_SO),
    "backward_prefetch": Retired("true", ALWAYS_SO),
    "tokenizer": Retired(
        "", "a token store holds the tokenizer that made it: get_dataset.py --tokenizer=NAME"
    ),
    "eos_token": Retired("", READ_BEFORE),
    "bos_token": Retired("", READ_BEFORE),
    "strip_tokens": Retired("", READ_BEFORE),
    "col_name": Retired("", READ_BEFORE),
    "pack": Retired("auto", READ_BEFORE),
    "index_dir": Retired("", READ_BEFORE),
}
# Values of settings that there are, in the same way.
RETIRED_VALUES = {
    ("tracker", "prometheus"): "metrics.jsonl and tensorboard hold the same numbers",
}
