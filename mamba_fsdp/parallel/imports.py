"""What torch imports when a run shards its model, for who wants it early. It asks CUDA nothing and starts no thread."""

import torch._dynamo
import torch.distributed.fsdp  # noqa: F401
