"""A folder as a user has it after a first training: data/builtin, runs/demo, exported/demo."""

import os

import pytest

from mamba_fsdp.settings.dataset_config import DatasetConfig
from tests.support.tiny import TINY, resolved


@pytest.fixture(scope="session")
def used(tmp_path_factory):
    from mamba_fsdp.data.tokenize import make_dataset
    from mamba_fsdp.interop.convert import publish, write_model
    from mamba_fsdp.trainer.run import run_training

    folder = tmp_path_factory.mktemp("used")
    (folder / "a.txt").write_text(
        "".join(f"def line_{n}(x): return {n} * x  # naïve\n" for n in range(600))
    )
    options = DatasetConfig(tokenizer="train:300", validation_fraction=0.2)
    make_dataset(str(folder / "a.txt"), folder / "data" / "builtin", options)
    given = TINY | {"vocab_size": 300, "num_steps": 4, "eval_interval": 0, "eval_batches": -1}
    given["dataset_path"] = folder / "data" / "builtin"
    given["save_ckpt_path"] = folder / "runs" / "demo"
    run_training(resolved(**given), write_model=publish)
    write_model(folder / "runs" / "demo", folder / "exported" / "demo")
    return folder


@pytest.fixture
def there(used, monkeypatch):
    """`used`, and this process stands in it."""
    monkeypatch.chdir(used)
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    return used


@pytest.fixture
def call(answer):
    """call(verb's module, *words) -> (exit code, what was said)."""

    def call(verb, *words):
        code, out, err = answer(verb, *words)
        return code, out + err

    return call
