"""Trains on the null device and says what happened: python -m tests.support.nullgpu.training SETTING=VALUE ...

num_steps=2,4 trains twice: the second time it resumes. After each time a line of stdout is a JSON object: `ended` (finished,
stopped, or the error), `untested` (kernels of Triton that training compiled and the check had not), `waits` (places in a
step where the host waited for the device), `left` (what of the device's resources training has not given back).
"""

import ctypes
import gc
import json
import os
import sys
import traceback
import warnings
from unittest.mock import patch

import torch
from triton.runtime.jit import JITFunction

import mamba_fsdp
from mamba_fsdp.errors import UserError
from mamba_fsdp.trainer import loop
from mamba_fsdp.trainer.layer_check import LayerCheck

SMALL = {
    "use_dummy_dataset": "true",
    "num_steps": "2,4",
    "checkpoint_interval": "2",
    "report_interval": "1",
    "eval_interval": "0",
    "num_workers": "0",
    "publish": "false",
    "seq_length": "256",
    "batch_size": "2",
    "d_model": "256",
    "n_layer": "2",
    "vocab_size": "512",
}
REGISTERED = 3  # of the kinds of memory in device.h


class Watch:
    """Watches the kernels that Triton compiles outside of the check of layers, and waits in steps."""

    def __init__(self):
        self.untested = set()
        self.waits = set()
        self.is_testing = False
        self.test_layers = LayerCheck.results
        self.take_step = loop.take_step

    def compiled(self, key=None, repr=None, **_):
        """Triton's hook: a kernel that is not compiled yet in this process."""
        if not self.is_testing:
            self.untested.add(f"{repr.split('[')[0]} {key}")
        return False

    def results(self, *given):
        self.is_testing = True
        try:
            return self.test_layers(*given)
        finally:
            self.is_testing = False

    def step(self, context, clock, stop, ahead=0):
        """A step; all but the first may not wait."""
        if context.state.step + ahead > 0:
            torch.cuda.set_sync_debug_mode("warn")
        try:
            return self.take_step(context, clock, stop, ahead)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def warned(self, message, *_, **__):
        if "synchronizing CUDA operation" in str(message):
            frames = [f for f in traceback.extract_stack() if "mamba_fsdp/" in f.filename]
            place = frames[-1]
            self.waits.add(f"{place.filename.split('mamba_fsdp/')[-1]}:{place.lineno}")


def train(settings):
    """How a training ended, and what the watch saw."""
    watch = Watch()
    warnings.simplefilter("always")
    with (
        patch.object(JITFunction, "cache_hook", watch.compiled),
        patch.object(LayerCheck, "results", lambda check, *given: watch.results(check, *given)),
        patch.object(loop, "take_step", watch.step),
        patch.object(warnings, "showwarning", watch.warned),
    ):
        try:
            ended = mamba_fsdp.train(**settings).stopped or "finished"
        except UserError as error:
            ended = f"error: {error}"
    return {"ended": ended, "untested": sorted(watch.untested), "waits": sorted(watch.waits)}


def resources():
    """What of the device is in use: bytes that the host has pinned in place, bytes of tensors."""
    gc.collect()
    library = ctypes.CDLL(os.environ["LD_PRELOAD"])
    return {
        "pinned in place": library.nullgpu_bytes(REGISTERED),
        "tensors": torch.cuda.memory_allocated(),
    }


def main(words):
    settings = SMALL | dict(word.split("=", 1) for word in words)
    for num_steps in settings.pop("num_steps").split(","):
        report = train(settings | {"num_steps": num_steps})
        report["left"] = {name: left for name, left in resources().items() if left}
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
