"""What is exported, transformers can use: layer lists drawn at random, on each stack."""

import dataclasses
import random
import re
import sys
import types
from pathlib import Path

import pytest
import torch
import transformers

from mamba_fsdp.errors import UserError
from mamba_fsdp.interop.architectures import ARCHITECTURES, architecture_for, exportable
from mamba_fsdp.interop.convert import write_model
from mamba_fsdp.interop.trial import ONE_PROMPT_BEFORE_5, try_export
from mamba_fsdp.interop.weights import read_weights
from mamba_fsdp.model.config import ModelConfig
from tests.support.small_models import GROUPED, assert_same, model_of, random_state, write_ours
from tests.support.tiny import model_config

pytestmark = pytest.mark.torch22
SIZES = dict(d_model=32, vocab_size=48, headdim=8, d_state=8, n_head=4, n_kv_head=2)
SIZES |= dict(d_intermediate=24, chunk_size=8)
OLMO = dict(qk_norm="whole", norm_position="after_attention", gdn_norm_eps=1e-5)
QWEN = dict(attention_gate=True, qk_norm="head")
NEMOTRON = dict(mlp_activation="relu2", rotary_dim=0, tie_embeddings=False)
KINDS = [  # (layers to draw from, settings to draw from)
    (["mamba1"], [{}, {"bcdt_norm_eps": 0.01}, {"d_ssm": 80}]),
    (["mamba2"], [{}, {"ngroups": 2}]),
    (["mamba2+mlp"], [{}, {"ssm_norm": "before"}, {"multipliers": "logits=0.5,residual=0.5"}]),
    (["attention+mlp"], [{}, {"rotary_dim": 0}, {"qk_norm": "head"}, QWEN, OLMO]),
    (["mamba2+mlp", "attention+mlp"], [{}, {"ngroups": 2}, {"multipliers": "residual=0.5"}]),
    (["mamba2/attention+mlp"], [{}, {"ssm_norm": "none"}]),
    (["mamba2", "attention", "mlp"], [NEMOTRON]),
    (["gdn+mlp", "attention+mlp"], [OLMO, QWEN]),
    (["mamba1", "mamba1+mlp", "mamba3", "gdn", "mamba2/attention"], [{}]),
]
TRANSFORMERS_5 = int(transformers.__version__.split(".")[0]) >= 5
NEW_TOKENS = 5


def drawn(seed):
    """A model with layers and settings that the seed draws."""
    choose = random.Random(seed)
    layers, settings = KINDS[seed % len(KINDS)]
    drawn_layers = choose.choices(layers, k=choose.randint(1, 4))
    tied = {"tie_embeddings": choose.random() < 0.5}
    layers = {"layers": ",".join(drawn_layers), "n_layer": len(drawn_layers)}
    return ModelConfig(**{**SIZES, **tied, **choose.choice(settings), **layers})


def continued(model, tokens):
    """The tokens with NEW_TOKENS most likely ones."""
    for _ in range(NEW_TOKENS):
        tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
    return tokens


@pytest.mark.parametrize("seed", range(27))
def test_an_export_computes_and_generates_the_same_or_is_refused_in_a_line(seed, tmp_path, capsys):
    config = drawn(seed)
    state = random_state(config)
    ours = write_ours(tmp_path / "ours", config, state)
    try:
        class_name = architecture_for(exportable(config)).class_name
    except UserError as error:
        assert len(f"export     {error}; .pth and this program's own") <= 120
        with pytest.raises(UserError, match=re.escape(str(error))):
            write_model(ours, tmp_path / "hf")
        return
    folder = write_model(ours, tmp_path / "hf")
    assert_same(read_weights(folder), config, state)
    told = capsys.readouterr().err
    if "not tried: it needs" in told:
        assert not TRANSFORMERS_5
        return
    version = f"transformers {transformers.__version__}"
    assert told.startswith(f"tried: {class_name} of {version} loads it, computes the same and ge")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32)
    assert type(theirs).__name__ == class_name
    model = model_of(config, state.get)
    several = 2 if TRANSFORMERS_5 or class_name != ONE_PROMPT_BEFORE_5 else 1
    tokens = torch.randint(1, 48, (several, 19), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        expected = model(tokens)
        for use_cache in (False, True):
            logits = theirs.eval()(tokens, use_cache=use_cache).logits
            torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-4)
            how = dict(max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
            found = theirs.generate(tokens, use_cache=use_cache, **how)
            assert torch.equal(found, continued(model, tokens))


@pytest.mark.parametrize("trial", [True, False])
def test_an_export_that_its_class_can_t_use_is_not_left(trial, tmp_path, monkeypatch, capfd):
    """A class that fails only with its cache; without the trial it is written as it is."""

    def fail(self, tokens, use_cache=True, **how):
        raise RuntimeError("no cache of this kind\nand more")

    monkeypatch.setattr(transformers.MambaForCausalLM, "generate", fail)
    ours = write_ours(tmp_path / "ours", ModelConfig(layers="mamba1", **SIZES))
    if not trial:
        assert write_model(ours, tmp_path / "hf", trial=False).exists()
        return
    words = r"MambaForCausalLM of transformers .*generating .* RuntimeError \(no cache of this kind\); --trial=false"
    with pytest.raises(UserError, match=words):
        write_model(ours, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_an_export_is_not_tried_in_a_transformers_that_is_too_old(tmp_path, monkeypatch):
    def told(**different):
        used = dataclasses.replace(architecture_for(GROUPED), **different)
        return try_export(tmp_path, used, GROUPED, write=None)

    older = types.SimpleNamespace(__version__="4.57.6", Mamba2ForCausalLM=None)
    monkeypatch.setitem(sys.modules, "transformers", older)
    assert told().startswith("not tried: it needs transformers 5 or newer; transformers 4.57.6, wh")
    expected = "not tried: it needs a newer transformers with NewLM; here is transformers 4.57.6"
    assert told(class_name="NewLM") == expected
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert told().startswith("not tried in transformers, which can't be imported (import of trans")


def rows_of_the_table():
    text = Path(__file__).parents[2].joinpath("docs/models.md").read_text()
    return re.findall(r"^\| `(\S+)` \| (?:`(.*)`)? ?\| (?:`(\w+ForCausalLM)`|none)", text, re.M)


@pytest.mark.parametrize(("layers", "settings", "class_name"), rows_of_the_table())
def test_the_table_in_docs_says_what_is_exported_as_what(layers, settings, class_name):
    words = f"layers={layers} d_state=16 headdim=16 ngroups=2 n_layer=4 {settings}"
    config = model_config(words)
    if class_name:
        assert architecture_for(exportable(config)).class_name == class_name
        return
    with pytest.raises(UserError, match="^no transformers model holds"):
        exportable(config)


def test_the_table_in_docs_is_found():
    named = {class_name for _, _, class_name in rows_of_the_table()}
    assert named - {""} == {architecture.class_name for architecture in ARCHITECTURES}
