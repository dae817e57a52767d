"""Three sizes of a model for a time, of which the middle one comes nearest to 20 tokens a parameter."""

import shlex
from types import SimpleNamespace

import pytest

from mamba_fsdp.errors import UserError
from mamba_fsdp.model.spec import parameter_count
from mamba_fsdp.planning.devices import INSTANCES, Instance
from mamba_fsdp.planning.sizes import Budget, Size, plan_sizes, report_sizes, three_sizes
from mamba_fsdp.settings.resolve import resolve_settings

H100 = Budget(
    hours=0.2,
    nodes=2,
    instance="p5.4xlarge",
    machine=INSTANCES["p5.4xlarge"],
    is_here=False,
    data_tokens=10**8,
    is_made=False,
)
HERE = Budget(
    hours=1.05,
    nodes=1,
    instance="",
    machine=Instance("cpu", 1, 8.0),
    is_here=True,
    data_tokens=10**6,
    is_made=True,
)


def size_of(width):
    """A size of 1,000 parameters a column, of which what is wider than 1,000 does not fit; 10 million tokens."""
    parameters = 1000 * width
    expected = SimpleNamespace(
        fits=width <= 1000, parameters=parameters, tokens_per_second=1e4, bytes=2e9
    )
    shape = {"d_model": str(width), "n_layer": str(width // 32)}
    return Size(shape, f"train {width}", 10**7, 9.0, 10**7 / parameters, expected)


def test_each_size_is_a_quarter_wider_and_the_middle_one_is_nearest_to_the_law():
    sizes = three_sizes(size_of)
    assert [size.settings["d_model"] for size in sizes.values()] == ["448", "512", "640"]
    ratios = [abs(size.tokens_per_parameter / 20) for size in sizes.values()]
    assert max(ratios[0], 1 / ratios[0]) > max(ratios[1], 1 / ratios[1])


def test_sizes_end_where_they_no_longer_fit():
    def large(width):
        size = size_of(width)
        return Size(size.settings, "", size.tokens, 1.0, 1e6, size.expected)

    sizes = [*three_sizes(large).values()]
    assert [size.expected.fits for size in sizes] == [True, True, False]


REPORT = """\
data       100,000,000 tokens
machines   2 x H100 of 85.0 GB, calculated
time       0.2 hours, a twentieth of them for validation

         layers x width parameters  tokens/s   tokens  passes tok/param   memory
smaller        14 x 448    448.0 k    10.0 k   10.0 M     9.0      22.3   2.0 GB
middle         16 x 512    512.0 k    10.0 k   10.0 M     9.0      19.5   2.0 GB
larger         20 x 640    640.0 k    10.0 k   10.0 M     9.0      15.6   2.0 GB

Compute-optimal are about 20 tokens per parameter (tok/param).
The data is too small for this time: 4 passes teach nearly as much as new data,
those after the 16th little. The middle size wants 2.5 Mtokens or more.

smaller:
train 448

middle:
train 512

larger:
train 640"""


def test_the_report_says_what_the_laws_say():
    assert "\n".join(report_sizes(three_sizes(size_of), H100)) == REPORT


def test_sizes_for_described_machines_train_for_the_time():
    sizes = plan_sizes({"batch_size": "16"}, None, H100, measure_pace=None)
    for size in sizes.values():
        program, nodes, launcher, *given = shlex.split(size.command)
        assert (program, nodes, launcher) == ("sbatch", "--nodes=2", "1.train.sbatch")
        words = dict(word.removeprefix("--").split("=", 1) for word in given)
        settings = resolve_settings(words)
        assert settings.training.num_steps.count == pytest.approx(size.tokens, rel=0.05)
        assert parameter_count(settings.model) == size.expected.parameters
        seconds = size.tokens / size.expected.tokens_per_second
        assert seconds == pytest.approx(720 / 1.05, rel=1e-3)
        assert size.passes == size.tokens / 1e8
    middle = sizes["middle"]
    assert 10 < middle.tokens_per_parameter < 40
    assert middle.settings["model_name"].startswith("mamba-")


def test_sizes_for_this_machine_are_timed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # without 1.train.sbatch
    words = {"dataset_path": "data/mine", "vocab_size": "300"}
    sizes = plan_sizes(words, None, HERE, measure_pace=lambda settings: 1000.0)
    middle = sizes["middle"]
    assert middle.tokens == 3_600_000 and middle.expected.tokens_per_second == 1000
    assert middle.command.startswith("mamba-fsdp train --dataset_path=data/mine --vocab_size=300 ")
    assert middle.command.endswith("--num_steps=3.6Mtok --save_ckpt_path=runs/mine-128")
    assert "model_name" not in middle.settings
    with pytest.raises(UserError, match="can time one device of this machine"):
        plan_sizes(words, None, Budget(**{**vars(HERE), "nodes": 2}), None)
