"""The names of what lies in a run folder. Constants alone, for the cluster's own Python too, which may be 3.6.

    config.yaml  metrics.jsonl  events.jsonl  status.json  lease.json  kernels.json  STOP  tokenizer/
    failures/  preflight/  .settings_JOB.RESTART
    checkpoints/step_00001000/   rank_00000.safetensors ...  state.json  COMMIT  KEEP
    pth/step_00001000/           consolidated.00.pth  config.json  tokenizer/
    profile/  tensorboard/  wandb/  wandb_id  report.html  lm_eval_TIME.json

1.train.sbatch uses some of these names too; a test holds it to this file.
"""

SETTINGS = "config.yaml"
METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"  # starts, ends, checkpoints, faults, over all restarts
# The backends that the run was begun with on a GPU, see trainer/first_use.py.
KERNELS = "kernels.json"
CACHES = ".cache"  # beside the run folders
STATUS = "status.json"
LEASE = "lease.json"
STOP = "STOP"  # whoever makes this file asks the run to stop
TOKENIZER = "tokenizer"  # of the data, beside the model that was trained on it
# The launcher writes these: first failures, the nodes' reports, and what each start resolved for its ranks.
FAILURES = "failures"
PREFLIGHT = "preflight"
RESOLVED = ".settings_"
CHECKPOINTS = "checkpoints"
STATE = "state.json"
COMMIT = "COMMIT"
KEPT = "KEEP"  # in a checkpoint: it is never removed
MODELS = "pth"
CONSOLIDATED = "consolidated.00.pth"
MODEL_CONFIG = "config.json"
PROFILE = "profile"
TENSORBOARD = "tensorboard"
WANDB_ID = "wandb_id"
REPORT = "report.html"
TASK_RESULTS = "lm_eval_{}.json"  # of lm-evaluation-harness, by the time of writing
