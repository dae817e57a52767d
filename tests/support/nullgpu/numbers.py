"""What a null device computes is garbage. Here, and nowhere else, the decisions that read it get numbers."""

import contextlib
from unittest.mock import patch

from mamba_fsdp.ops.attention import Documents
from mamba_fsdp.trainer import layer_check
from mamba_fsdp.trainer.step_stats import StepStats

LOSS = 1.0


@contextlib.contextmanager
def replaced():
    """Until the block ends: a layer's results are right and repeat, a step is applied and has a loss, a row of tokens
    on the device has three documents."""
    with (
        patch.object(layer_check, "relative_error", lambda found, exact: 0.0),
        patch.object(layer_check.LayerCheck, "compare", _compare),
        patch.object(StepStats, "unpack", staticmethod(_unpack)),
        patch.object(Documents, "of", classmethod(_documents)),
    ):
        yield


_true_compare = layer_check.LayerCheck.compare
_true_documents = Documents.of.__func__


def _compare(check, kind, backends):
    return _true_compare(check, kind, backends)._replace(share=0.0, bits="the same")


def _unpack(numbers):
    """The numbers of the host, which come back as they went, are those of a CPU; the rest of a good step."""
    seconds = [0.1] * (len(numbers) - StepStats.FIXED)
    return StepStats(LOSS, 1.0, True, 65536.0, 1, False, False, seconds)


def _documents(cls, seq_idx):
    if not seq_idx.is_cuda:
        return _true_documents(cls, seq_idx)
    rows, positions = seq_idx.shape
    third = positions // 3
    return cls([third, third, positions - 2 * third] * rows)
