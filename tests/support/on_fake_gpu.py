"""python on_fake_gpu.py LIBRARY SETTINGS...: a step on a GPU that is none; prints a line of JSON for each of SETTINGS,
{"model": {...}, "size", "rank", ...}. LIBRARY: fake_gpu.cpp, compiled."""

import ctypes
import json
import sys
from importlib import util
from pathlib import Path
from unittest import mock

library = Path(util.find_spec("torch").origin).parent / "lib"
for needed in (library / "libc10.so", library / "libtorch_cpu.so", sys.argv[1]):
    ctypes.CDLL(str(needed), mode=ctypes.RTLD_GLOBAL)


def main():
    # Not before the library is loaded.
    import torch

    from benchmarks.simulate import simulate
    from config.model_config import ModelConfig
    from config.train_config import TrainConfig

    streams = {name: getattr(torch.cpu, name) for name in ("Stream", "current_stream", "stream")}
    gpu = {**streams, "Event": torch.Event, "current_device": lambda: 0}
    for case in map(json.loads, sys.argv[2:]):
        settings = TrainConfig()
        settings.model = ModelConfig(**case["model"])
        settings.data.seq_length, settings.training.batch_size = 8, 2
        for section, given in case.get("settings", {}).items():
            for name, value in given.items():
                setattr(getattr(settings, section), name, value)
        with mock.patch.multiple(torch.cuda, **gpu):
            found = simulate(settings, case["size"], case["rank"], device=torch.device("cuda", 0))
        collectives = [
            [one.name, str(one.dtype), one.numel, one.ranks] for one in found.collectives
        ]
        print(json.dumps({"collectives": collectives, "peak": found.peak}), flush=True)


if __name__ == "__main__":
    main()
