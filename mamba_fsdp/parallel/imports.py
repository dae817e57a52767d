"""What torch imports when a run shards its model, for who wants it early. It asks CUDA nothing and starts no thread."""

import torch._dynamo  # noqa: F401

from mamba_fsdp.parallel.compat import load_shard

load_shard()
