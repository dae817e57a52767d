"""A new mixer is one entry in spec.py and one class in layers.py: a toy is trained, counted, saved and converted."""

import torch
import torch.nn.functional as F

from config.resolve import resolve_settings
from mamba_fsdp.interop.convert import to_our_form
from mamba_fsdp.model import layers, spec
from mamba_fsdp.model.init import initial_value

TOY = spec.Spec(
    settings=("d_conv",),
    parameters=lambda config: {
        "gain": spec.Parameter((config.d_model,), spec.Init("uniform", 0.5, 2.0), fp32=True),
        "taps.weight": spec.matrix(config.d_model, config.d_conv),
        "out.weight": spec.into_residual(config, config.d_model),
    },
    flops=lambda config, seq_length: 2.0 * config.d_model,
)


class Toy(layers.Part):
    """A decaying sum of the inputs so far, in `d_conv` steps."""

    kind = TOY

    def forward(self, x, seq_idx=None, state=None, position=0):
        taps = self.taps.weight.to(x.dtype)
        y = sum(
            taps[:, shift] * F.pad(x, (0, 0, shift, 0))[:, : x.shape[1]]
            for shift in range(taps.shape[1])
        )
        return self.out(y * self.gain.to(x.dtype))


def test_a_toy_mixer_needs_nothing_else(monkeypatch, tmp_path, train, weights_of):
    monkeypatch.setitem(spec.MIXERS, "toy", TOY)
    monkeypatch.setitem(layers.MIXERS, "toy", Toy)
    model = dict(layers="toy+mlp,mamba1", d_intermediate=16, d_conv=3)
    train(
        tmp_path / "run",
        **model,
        num_steps=4,
        weight_decay=0.5,
        mixed_precision="bf16",
        eval_interval=0,
    )
    train(
        tmp_path / "run",
        **model,
        num_steps=6,
        weight_decay=0.5,
        mixed_precision="bf16",
        eval_interval=0,
    )

    config = resolve_settings({}, str(tmp_path / "run/config.yaml"))[0].model
    described = spec.parameters(config)
    trained = weights_of(tmp_path / "run")
    assert {
        name: tuple(value.shape) for name, value in trained.items() if name != spec.LM_HEAD
    } == {name: parameter.shape for name, parameter in described.items()}
    gain = "backbone.layers.0.mixer.gain"
    start = initial_value(gain, described[gain], 2023)
    assert 0.5 <= start.min() < start.max() <= 2 and (trained[gain] - start).abs().max() < 0.3
    decaying = {
        name for name, parameter in described.items() if ".0.mixer." in name and parameter.decay
    }
    assert decaying == {"backbone.layers.0.mixer.taps.weight", "backbone.layers.0.mixer.out.weight"}
    toy, mlp, head = 16 * 3 + 16 * 16, 3 * 16 * 16, 64 * 16  # multiply-adds of d_model 16
    mamba1 = 16 * 64 + 32 * 3 + 32 * (1 + 8) + 32 + 32 * 16 + 3 * 32 * 4
    assert spec.flops_per_token(config, 64) == 6 * (toy + mlp + mamba1 + head) + 3 * 2 * 16

    to_our_form(tmp_path / "run", tmp_path / "ours", dtype="bf16")
    converted = torch.load(tmp_path / "ours/consolidated.00.pth", weights_only=True)
    assert (
        converted[gain].dtype == torch.float32
        and converted["backbone.layers.0.mixer.out.weight"].dtype == torch.bfloat16
    )
