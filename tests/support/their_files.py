"""Files as other launchers have them, and the commands of the pages for those who come from there."""

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"

COMPOSER = """
model: {vocab_size: 65024, d_model: 2688, n_layer: 28, fsdp_layer_wrap: true, activation_checkpointing: true}
data:
  {global_batch_size: 896, micro_batch_size: 7, eval_batch_size: 8, seq_len: 4096, num_workers: 2, prefetch_factor: 2,
   n_total_tokens: 400039358022, n_samples_to_skip: 0, code_percentage: 0.4, text_percentage: 0.6,
   text_paths: [{path: /fsx/mamba-v1/book.train.gig.npy, weight: 0.6, order: 0}],
   code_paths: [{path: /fsx/mamba-v1/c.train.gig.npy, weight: 0.4, order: 0}]}
optimizer: {lr: 0.00045, beta1: 0.9, beta2: 0.95, weight_decay: 0.1}
scheduler: {name: wsd, t_warmup: 1006878720tok, t_max: 10068787200tok, t_decay: 1006878720tok, alpha_f: 0.1}
fsdp: {sharding_strategy: FULL_SHARD, process_group: null, backward_prefetch: BACKWARD_PRE, verbose: true,
       activation_checkpointing_reentrant: true, activation_checkpointing: true, limit_all_gathers: false}
trainer: {cp_interval: 1006878720tok, eval_interval: 1006878720tok, save_interval: 1006878720tok,
          eval_subset_num_batches: 16,
          save_folder: /fsx/checkpoints, auto_log_hparams: true, autoresume: true}
general: {project_name: mamba-science, full_name: mambaoutai, window_size: 10, clipping_threshold: 1.0,
          position_weighting: true}
"""
TRAINER = """
model: {d_model: 768, n_layer: 24, vocab_size: 50280, d_state: 16, d_conv: 4, expand: 2, dt_rank: auto, rms_norm: true}
data: {dataset_name: Salesforce/wikitext, max_seq_length: 2048, train_batch_size: 4, dataloader_num_workers: 4}
training: {output_dir: ./outputs, run_name: mine, num_train_epochs: 5, max_steps: -1, per_device_train_batch_size: 4,
           gradient_accumulation_steps: 8, learning_rate: 5.0e-4, adam_beta2: 0.95, lr_scheduler_type: cosine,
           warmup_steps: 1000, fp16: false, bf16: true, gradient_checkpointing: true, optim: adamw_torch,
           eval_strategy: steps, eval_steps: 1000, save_steps: 2000, logging_steps: 100,
           report_to: [tensorboard, wandb], seed: 42}
wandb: {project: mamba-wikitext103, entity: null}
use_wandb: true
train_from_scratch: true
"""
SCRIPT = """#!/bin/bash
#SBATCH --nodes=4 # number of nodes
GPUS_PER_NODE=8 # 4 for G5.12x
: "${{DATA_PATH:=/fsx}}"
declare -a TORCHRUN_ARGS=(
    --nproc_per_node=$GPUS_PER_NODE \\
    --rdzv_endpoint=$(hostname) \\
)
declare -a MODEL_ARGS=(
    {0}
)
srun -l torchrun "${{TORCHRUN_ARGS[@]}}" $TRAIN_SCRIPT "${{MODEL_ARGS[@]}}"
"""


def commands(launcher):
    blocks = re.findall(
        r"^```sh\n(.*?)^```", (DOCS / f"from-{launcher}.md").read_text(), flags=re.M | re.S
    )
    return [line for block in blocks for line in block.splitlines()]


def script(launcher):
    """Their script with the words of the page's first training command."""
    line = next(line for line in commands(launcher) if "training.py" in line)
    return SCRIPT.format("\n    ".join(word for word in line.split() if word.startswith("--")))
