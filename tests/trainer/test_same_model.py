"""A model is the same by its structure, however its settings are written, wherever a run gets it from.

That another model is refused with both values is held where a run resumes and starts (test_first_start.py, test_runs.py),
and for weights of files (tests/interop/test_refusals.py, tests/settings/test_model_of_weights.py)."""

HEADS = {"n_head": 2, "n_kv_head": 2}


def test_other_words_for_the_same_model_are_no_other_model(train, tmp_path):
    before = {"layers": "mamba1,attention", "rotary_dim": 8, **HEADS}
    after = {"layers": "1*mamba1,attention,mamba1", "head_dim": 8, **HEADS}
    first = tmp_path / "first"
    train(first, num_steps=2, eval_interval=0, **before)
    pth = first / "pth/step_00000002/consolidated.00.pth"
    said = train(tmp_path / "pth", num_steps=4, eval_interval=0, load_ckpt_path=pth, **after)
    assert "starting " in said and "step 4/4" in said
    said = train(first, num_steps=4, eval_interval=0, **after)
    assert "resumes " in said and "step 4/4" in said
