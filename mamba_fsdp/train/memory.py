"""Out of memory, said as what a user can do about it."""

import contextlib
from collections.abc import Callable, Iterator

import torch

from mamba_fsdp.errors import UserError, first_line


@contextlib.contextmanager
def explained(rank: int, while_: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Raises a UserError instead of PyTorch's when memory runs out inside and `while_()` holds, for as long as it is
    the settings that ask for too much. Later it may be an accident that a new start mends, and stays PyTorch's."""
    try:
        yield
    except RuntimeError as error:
        out_of_memory = isinstance(error, torch.cuda.OutOfMemoryError) or "can't allocate memory" in str(error)
        if not (out_of_memory and while_()):
            raise
        raise UserError(f"rank {rank} has too little memory: lower batch_size or seq_length (global_batch_size keeps "
                        "the batch), set fsdp_activation_checkpointing=true, or shard over more ranks "
                        f"({first_line(error)[:200]})") from error
