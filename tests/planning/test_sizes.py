"""Tests mamba_fsdp.planning.sizes: `plan --hours` proposes three sizes of a model that can be trained in a given time.
The middle one is nearest to 20 tokens per parameter."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from mamba_fsdp.errors import UserError
from mamba_fsdp.planning.devices import INSTANCES, Instance
from mamba_fsdp.planning.sizes import (
    Budget,
    Size,
    choose_sizes,
    command,
    plan_sizes,
    report_sizes,
)

HERE = Budget(
    hours=1.05,
    nodes=1,
    instance="",
    machine=Instance("cpu", 1, 8.0),
    is_local=True,
    data_tokens=10**6,
    data_exists=True,
)
H100 = replace(
    HERE, hours=0.2, nodes=2, instance="p5.4xlarge", machine=INSTANCES["p5.4xlarge"], is_local=False
)
NARROW = replace(
    H100, hours=1e-5, instance="", machine=Instance("H100", 1, 1.56, 3350), data_tokens=1000
)


def size_of(width):
    """Returns a size with 1,000 parameters per unit of width, for 10 million tokens. Widths above 1,000 do not fit in
    memory."""
    parameters = 1000 * width
    expected = SimpleNamespace(
        fits=width <= 1000, parameters=parameters, tokens_per_second=1e4, bytes=2e9
    )
    shape = {"d_model": str(width), "n_layer": str(width // 32)}
    return Size(shape, f"train {width}", 10**7, 4.0, 10**7 / parameters, expected)


def test_sizes_grow_by_a_quarter_and_the_middle_one_is_nearest_to_compute_optimal():
    sizes = choose_sizes(size_of)
    assert [size.settings["d_model"] for size in sizes.values()] == ["448", "512", "640"]


def test_no_size_is_proposed_after_the_first_one_that_does_not_fit():
    def large(width):
        return replace(size_of(width), tokens_per_parameter=1e6)

    sizes = [*choose_sizes(large).values()]
    assert [size.expected.fits for size in sizes] == [True, True, False]


REPORT = """\
data       1,000 tokens
machines   2 x H100 of 1.6 GB, calculated
time       1e-05 hours, a twentieth of them for validation

         layers x width parameters  tokens/s   tokens  passes tok/param   memory
smaller          2 x 64     81.9 k     3.6 M  123.9 k   123.9       1.5   1.5 GB
middle          4 x 128    499.3 k   905.7 k   31.1 k    31.1       0.1   1.5 GB
larger          6 x 192      1.6 M     7.2 M  246.2 k   246.2       0.2   2.6 GB does NOT fit

About 20 tokens per parameter (tok/param) are compute-optimal.
The time is too short: even the smaller size gets fewer.
The data is too small for this time: 4 passes teach nearly as much as new data,
passes after the 16th very little. The middle size needs 7.8 ktokens or more.

smaller:
sbatch --nodes=2 1.train.sbatch --vocab_size=256 --d_model=64 --n_layer=2 --model_name=mamba-130m --batch_size=2 \
--fsdp_activation_checkpointing=true --selective_checkpointing=1 --num_steps=123.9ktok --save_ckpt_path=runs/builtin-64

middle:
sbatch --nodes=2 1.train.sbatch --vocab_size=256 --d_model=128 --n_layer=4 --model_name=mamba-130m --batch_size=1 \
--fsdp_activation_checkpointing=true --selective_checkpointing=1 --num_steps=31.1ktok --save_ckpt_path=runs/builtin-128

larger:
sbatch --nodes=2 1.train.sbatch --vocab_size=256 --d_model=192 --n_layer=6 --model_name=mamba-130m --batch_size=16 \
--num_steps=246.2ktok --save_ckpt_path=runs/builtin-192"""


def test_the_report_for_a_small_machine():
    """The report lists three sizes with their commands. On this machine, the two smaller sizes fit because they
    recompute activations, and the larger size does not fit."""
    sizes = plan_sizes({"vocab_size": "256"}, None, NARROW, measure_pace=None)
    assert "\n".join(report_sizes(sizes, NARROW)) == REPORT
    enough = "\n".join(report_sizes(choose_sizes(size_of), replace(HERE, data_tokens=10**7)))
    assert ", timed\n" in enough and " too " not in enough


COMMANDS = [  # (differences from this machine, settings file, start of the command)
    ({}, None, "mamba-fsdp train"),
    ({"nodes": 2}, "a.yaml", "sbatch --nodes=2 1.train.sbatch --config=a.yaml"),
    ({"instance": "p4d.24xlarge"}, None, "sbatch --nodes=1 1.train.sbatch"),
]


def test_the_command_uses_the_launcher_in_a_checkout_and_the_verb_in_a_package(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for different, config, start in COMMANDS:
        words = command({"seed": "1 2"}, config, replace(HERE, **different))
        assert words == f"{start} '--seed=1 2'"
    (tmp_path / "1.train.sbatch").touch()
    assert command({}, None, HERE) == "./1.train.sbatch"


def test_the_recipe_belongs_to_the_next_narrower_preset():
    for hours, width, name in ((0.2, 384, "mamba-130m"), (16, 1152, "mamba-370m")):
        sizes = plan_sizes({"batch_size": "16"}, None, replace(H100, hours=hours), None)
        chosen = sizes["middle"].settings
        assert (chosen["d_model"], chosen["model_name"]) == (str(width), name)
        assert "selective_checkpointing" not in chosen


def test_only_one_device_of_this_machine_is_timed():
    with pytest.raises(UserError, match="can time one device of this machine"):
        plan_sizes({"dataset_path": "data/mine"}, None, replace(HERE, nodes=2), None)
