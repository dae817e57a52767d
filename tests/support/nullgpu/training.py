"""Trains on the null device, and prints a JSON object for each training.

    python -m tests.support.nullgpu.training SETTING=VALUE ...

num_steps=2,4,answer trains twice, the second time from a checkpoint, and then evaluates and generates. The fields are
`ended` (finished, stopped, or the error), `untested` (Triton kernels that were compiled outside of the test of layers),
`waits` (places in a step where the host waited for the device) and `left` (resources of the device that are still in use).
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
import triton

import mamba_fsdp
from mamba_fsdp.errors import UserError
from mamba_fsdp.ops.triton import is_version_2
from mamba_fsdp.trainer import loop
from mamba_fsdp.trainer.layer_check import LayerCheck

# The sizes of the benchmarks' smallest models, so that Triton does not compile kernels twice.
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
    "d_model": "64",
    "n_layer": "2",
    "d_state": "16",
    "headdim": "32",
    "vocab_size": "512",
}
DEVICE, PINNED, REGISTERED = 1, 2, 3  # kinds of memory; the values are defined in device.h
STREAMS, EVENTS = 5, 6  # counters; the values are defined in device.h


class Watch:
    """Records the kernels that Triton compiles outside of the layer check, and the waits of the host during steps."""

    def __init__(self):
        self.untested = set()
        self.waits = set()
        self.is_testing = False
        self.test_layers = LayerCheck.results
        self.take_step = loop.take_step

    def compiled(self, key=None, repr=None, **_):
        """Records a kernel that is not compiled yet in this process. Triton calls this method as a hook before it
        compiles."""
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
        """Replaces loop.take_step. In all steps except the first step of a run, torch warns if the host waits for the
        device."""
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


def hook_of_triton():
    """Returns the object and the attribute name of the hook that Triton calls before it compiles."""
    if is_version_2():
        return triton.JITFunction, "cache_hook"
    return triton.knobs.runtime, "jit_cache_hook"


def train(settings):
    return mamba_fsdp.train(**settings).stopped or "finished"


def answer(settings):
    """Runs evaluate and generate, with windows and a prompt of different lengths."""
    validation = f"{settings['dataset_path']}/validation"
    model = mamba_fsdp.load(settings["save_ckpt_path"])
    for seq_length in (64, 251):
        mamba_fsdp.evaluate(model, validation, seq_length=seq_length, limit=3)
    return f"{len(list(mamba_fsdp.generate(model, 'x = 1', length=3)))} tokens"


def watched(work, settings):
    """Returns how a training or `answer` ended, and what the Watch recorded."""
    watch = Watch()
    warnings.simplefilter("always")
    with (
        patch.object(*hook_of_triton(), watch.compiled),
        patch.object(LayerCheck, "results", lambda check, *given: watch.results(check, *given)),
        patch.object(loop, "take_step", watch.step),
        patch.object(warnings, "showwarning", watch.warned),
    ):
        try:
            ended = work(settings)
        except UserError as error:
            ended = f"error: {error}"
    return {"ended": ended, "untested": sorted(watch.untested), "waits": sorted(watch.waits)}


def resources():
    """Returns the resources of the device that are in use: bytes of host memory that were pinned in place, pinned
    bytes that torch caches, bytes of tensors, device bytes that torch caches, streams, and events."""
    gc.collect()
    library = ctypes.CDLL(os.environ["LD_PRELOAD"])
    return {
        "pinned in place": library.nullgpu_bytes(REGISTERED),
        "pinned": library.nullgpu_bytes(PINNED),
        "tensors": torch.cuda.memory_allocated(),
        "device": library.nullgpu_bytes(DEVICE),
        "streams": library.nullgpu_counter(STREAMS),
        "events": library.nullgpu_counter(EVENTS),
    }


def main(words):
    settings = SMALL | dict(word.split("=", 1) for word in words)
    for num_steps in settings.pop("num_steps").split(","):
        if num_steps == "answer":
            report = watched(answer, settings)
        else:
            report = watched(train, settings | {"num_steps": num_steps})
        report["left"] = {name: left for name, left in resources().items() if left}
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
