"""Files that transformers has cut, and types; what transformers computes and saves: test_families.py."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from mamba_fsdp.interop.convert import write_model
from mamba_fsdp.interop.weights import read_weights
from tests.support.small_models import (
    CONFIGS,
    assert_same,
    random_state,
    write_ours,
)

pytestmark = pytest.mark.torch22


def test_files_that_transformers_has_cut_are_read(tmp_path):
    config, state = CONFIGS["hybrid"], random_state(CONFIGS["hybrid"])
    write_model(write_ours(tmp_path / "ours", config, state), tmp_path / "hf")
    AutoModelForCausalLM.from_pretrained(tmp_path / "hf").save_pretrained(
        tmp_path / "theirs", max_shard_size="20KB"
    )
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    assert_same(read_weights(tmp_path / "theirs"), config, state)


@pytest.mark.parametrize("format", ["hf", "state-spaces"])
def test_a_chosen_type_leaves_what_has_to_be_fp32(format, tmp_path):
    config, state = CONFIGS["mamba1"], random_state(CONFIGS["mamba1"])
    write_model(
        write_ours(tmp_path / "ours", config, state), tmp_path / "out", format=format, dtype="bf16"
    )
    weights = read_weights(tmp_path / "out")
    for name, tensor in state.items():
        fp32 = name.endswith((".A_log", ".D", ".dt_proj.bias"))
        assert torch.equal(weights.get(name), tensor if fp32 else tensor.bfloat16()), name
