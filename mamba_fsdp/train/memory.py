"""Out of memory, as an error that says which settings to change."""

import contextlib
from collections.abc import Callable, Iterator

import torch

from mamba_fsdp.errors import UserError, first_line


@contextlib.contextmanager
def explained(rank: int, while_: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Raises UserError instead of PyTorch's error where memory runs out inside while `while_()` holds: at the start the
    settings ask for too much. Later it may be an accident that a restart mends, and stays PyTorch's error."""
    try:
        yield
    except RuntimeError as error:
        out_of_memory = isinstance(error, torch.cuda.OutOfMemoryError) or "can't allocate memory" in str(error)
        if not (out_of_memory and while_()):
            raise
        raise UserError(f"rank {rank} has too little memory: lower batch_size or seq_length (global_batch_size keeps "
                        "the batch), set fsdp_activation_checkpointing=true, or shard over more ranks "
                        f"({first_line(error)[:200]})") from error
