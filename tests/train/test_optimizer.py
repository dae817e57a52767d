"""Which parameters decay, and the loss scale of fp16."""

from config.model_config import ModelConfig
from mamba_fsdp.model.spec import parameters
from mamba_fsdp.train.optimizer import LossScale
from mamba_fsdp.train.state import TrainState


def test_only_matrices_decay():
    for layers in ("mamba1", "mamba2", "attention+mlp"):
        config = ModelConfig(layers=layers, n_layer=1, d_intermediate=32 if "mlp" in layers else 0)
        for name, parameter in parameters(config).items():
            kept = name.endswith((".A_log", ".D", ".dt_bias", ".bias", "norm.weight", "norm2.weight", "norm_f.weight"))
            assert parameter.decay != kept, name


def test_the_scale_halves_on_overflow_and_explains_it_until_it_is_one():
    scale = LossScale(TrainState(), dynamic=True)
    explained = [scale.update(False) for _ in range(20)]
    assert explained == [True] * 16 + [False] * 4 and scale.value == 1.0
    for _ in range(LossScale.GROWTH_INTERVAL):
        assert not scale.update(True)
    assert scale.value == 2.0


def test_without_fp16_there_is_no_scale():
    scale = LossScale(TrainState(), dynamic=False)
    assert not scale.update(False) and scale.value == 1.0
