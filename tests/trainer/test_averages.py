"""Tests that the mean of checkpoints equals the mean of NumPy and is a normal model.

tests/verbs/transcript.txt tests its errors.
"""

import numpy as np
import pytest

from mamba_fsdp.errors import UserError
from mamba_fsdp.interop.convert import write_mean
from mamba_fsdp.interop.weights import read_weights
from mamba_fsdp.verbs.average import Options, main


@pytest.mark.torch22
def test_the_mean_is_numpys_and_a_model_like_any_other(train, corpus, tmp_path, capsys):
    run = tmp_path / "run"
    train(run)
    capsys.readouterr()
    main(f"{run}/", options=Options(steps=[2, 6], weights=[1.0, 3.0], evaluate=str(corpus)))
    out = tmp_path / "run-average"
    said = capsys.readouterr().out
    assert said.startswith(f"{out}\n") and said.count("\nloss ") == 3
    mean = read_weights(out)
    models = [read_weights(run / f"checkpoints/step_0000000{step}") for step in (2, 6)]
    for name in mean.shapes:
        tensors = [model.get(name).double().numpy() for model in models]
        expected = np.average(tensors, axis=0, weights=[1, 3]).astype(np.float32)
        np.testing.assert_array_max_ulp(mean.get(name).numpy(), expected, 1)
    train(tmp_path / "next", init_from=out, num_steps=1)
    train(tmp_path / "other", d_model=32)
    different = [run / "checkpoints/step_00000006", tmp_path / "other/checkpoints/step_00000006"]
    with pytest.raises(UserError, match="does not fit the model: .*embedding.weight is .64, 16."):
        write_mean(different, [0.5, 0.5], tmp_path / "mean")
    assert not (tmp_path / "mean").exists()
