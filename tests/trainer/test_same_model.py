"""A model is the same by its structure, however its settings are written, wherever a run gets it from."""

import pytest

from mamba_fsdp.errors import UserError

# What the first run is made with, and other words for the same model.
WORDS = {
    "layers": ({}, {"layers": "mamba1,2*mamba1"}),
    "head_dim": (
        {"layers": "mamba1,attention", "n_head": 2, "n_kv_head": 2, "rotary_dim": 8},
        {"layers": "mamba1,attention", "n_head": 2, "n_kv_head": 2, "head_dim": 8},
    ),
}


def start_from(start, first):
    """(the run folder, the settings) of a start from the run `first`."""
    pth = first / "pth" / "step_00000002" / "consolidated.00.pth"
    settings = {
        "resume": {},
        "folder": {"load_ckpt_path": first},
        "pth": {"load_ckpt_path": pth},
        "init_from": {"init_from": first},
    }
    return first if start == "resume" else first.parent / start, settings[start]


@pytest.mark.parametrize("words", WORDS)
def test_other_words_for_the_same_model_are_no_other_model(train, tmp_path, words):
    before, after = WORDS[words]
    train(tmp_path / "first", num_steps=2, eval_interval=0, **before)
    for start in ("pth", "resume"):
        run, given = start_from(start, tmp_path / "first")
        said = train(run, num_steps=4, eval_interval=0, **after, **given)
        assert ("resumes " if start == "resume" else "starting ") in said and "step 4/4" in said


def test_another_model_is_refused_with_both_values(train, tmp_path):
    there = r"holds another model .*: d_model=32 \(there 16\)"
    train(tmp_path / "first", num_steps=2, eval_interval=0)
    for start, message in {
        "resume": f"step_00000002 {there}; give .* another save_ckpt_path$",
        "folder": f"step_00000002 {there}; give .* another load_ckpt_path$",
        "pth": f"load_ckpt_path .*consolidated.00.pth {there}$",
        "init_from": f"init_from .*first {there}$",
    }.items():
        run, given = start_from(start, tmp_path / "first")
        with pytest.raises(UserError, match=message):
            train(run, num_steps=4, eval_interval=0, d_model=32, **given)
