"""Tests exports to transformers: the exported model has the same logits and gradients and can generate text, and
importing the export restores the weights bit for bit."""

import dataclasses
import json
import re
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers

from mamba_fsdp.conventions import IGNORED_LABEL
from mamba_fsdp.errors import UserError
from mamba_fsdp.interop.architectures import ARCHITECTURES, architecture_for, exportable
from mamba_fsdp.interop.convert import write_model
from mamba_fsdp.interop.trial import try_export
from mamba_fsdp.interop.weights import read_weights
from tests.support.small_models import (
    CONFIGS,
    GROUPED,
    assert_same,
    model_of,
    random_state,
    write_ours,
    write_tokenizer,
)
from tests.support.tiny import model_config

pytestmark = pytest.mark.torch22
TOLERANCE = 1e-5  # the largest accepted error, as a fraction of the largest value in a tensor
TRANSFORMERS_5 = int(transformers.__version__.split(".")[0]) >= 5
DOCS = Path(__file__).parents[2].joinpath("docs/models.md").read_text()
ROWS = re.findall(r"^\| `(\S+)` \| (?:`(.*)`)? ?\| (?:`(\w+ForCausalLM)`|none)", DOCS, re.M)
GRANITE = "expand=3 multipliers=embedding=0.4,residual=0.5,logits_divisor=0.6,attention_q=0.7"
FALCON = (
    "ngroups=3 d_ssm=72 tie_embeddings=true rope_theta=1e11 multipliers=embedding=0.3,logits=0.35,attention_k=0.4,ssm_in=0.45,"
    "ssm_out=0.5,ssm_z=0.55,ssm_x=0.6,ssm_B=0.65,ssm_C=0.7,ssm_dt=0.75,mlp_gate=0.8,mlp_out=0.85,attention_in=0.9,"
    "attention_out=0.95"
)
NEMOTRON = "mlp_activation=relu2 rotary_dim=0 ngroups=3 d_ssm=48 head_dim=16"
OLMO = "qk_norm=whole norm_position=after_attention gdn_norm_eps=1e-5 norm_eps=1e-6"
QWEN = "attention_gate=true qk_norm=head rope_theta=1e7 norm_eps=1e-6 d_state=11"
ODD = [  # (layers, settings, class of transformers) with unusual sizes and settings
    ("mamba1", "d_state=5 d_conv=3 dt_rank=7 expand=3 tie_embeddings=true", "MambaForCausalLM"),
    ("mamba1", "d_state=5 d_ssm=40 bcdt_norm_eps=0.03", "FalconMambaForCausalLM"),
    ("mamba2", "ngroups=2 tie_embeddings=true", "Mamba2ForCausalLM"),
    (
        "attention+mlp,mamba2+mlp",
        "n_kv_head=1 head_dim=20 rotary_dim=14 rope_theta=5e5",
        "BambaForCausalLM",
    ),
    (
        "attention+mlp",
        "n_head=8 head_dim=12 rope_theta=1e6 tie_embeddings=true",
        "LlamaForCausalLM",
    ),
    ("attention+mlp,mamba2+mlp", f"rotary_dim=16 {GRANITE}", "GraniteMoeHybridForCausalLM"),
    (
        "mamba2+mlp,2*attention+mlp",
        f"rotary_dim=0 tie_embeddings=true {GRANITE}",
        "GraniteMoeHybridForCausalLM",
    ),
    ("mamba2/attention+mlp", f"ssm_norm=after {FALCON}", "FalconH1ForCausalLM"),
    ("mamba2/attention+mlp", f"ssm_norm=before norm_eps=1e-6 {FALCON}", "FalconH1ForCausalLM"),
    ("mamba2/attention+mlp", f"ssm_norm=none head_dim=16 {FALCON}", "FalconH1ForCausalLM"),
    ("mlp,mamba2,attention,mamba2,mlp", NEMOTRON, "NemotronHForCausalLM"),
    (
        "gdn+mlp,attention+mlp",
        f"rotary_dim=0 allow_neg_eigval=true {OLMO}",
        "OlmoHybridForCausalLM",
    ),
    (
        "2*gdn+mlp,attention+mlp",
        f"ngroups=3 d_ssm=72 rope_theta=5e5 {OLMO}",
        "OlmoHybridForCausalLM",
    ),
    ("gdn+mlp,attention+mlp", f"rotary_dim=4 ngroups=2 {QWEN}", "Qwen3_5ForCausalLM"),
    ("gdn+mlp,attention+mlp", f"rotary_dim=8 tie_embeddings=true {QWEN}", "Qwen3_5ForCausalLM"),
]
GDN_LENGTHS = (1, 64, 101)  # less than a chunk, one chunk, and more than a chunk


def config_of(layers, settings):
    sizes = (
        "d_model=64 n_layer=4 vocab_size=53 headdim=8 d_state=16 chunk_size=8 n_head=4 n_kv_head=2"
    )
    return model_config(
        f"layers={layers} {sizes} d_intermediate=41 tie_embeddings=false {settings}"
    )


def assert_close(found, expected, name):
    error = (found - expected).abs().max()
    # For a text of a single token, some gradients are zero except for rounding errors.
    assert error <= TOLERANCE * expected.abs().max() + 1e-12, (name, error)


def gradients_by_our_name(architecture, config, theirs):
    """Returns {our name of a parameter: its gradient} of a model of transformers. The parameters of a model of
    transformers can have other names than the tensors in its files."""
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    found = {}
    for our_name, stored in architecture.stored_tensors(config).items():
        names = []
        for tensor in stored:
            name = re.sub("[qkv]_conv1d", "conv1d", tensor.name)
            name = name.replace("attention_layer_norm", "input_layernorm")
            name = name.replace("feedforward_layer_norm", "post_attention_layernorm")
            if name not in gradients:
                name = name.replace("backbone.", "model.")
            names.append(name)
        rows = [gradients[name] for name in dict.fromkeys(names)]
        if our_name.endswith(tuple(architecture.swapped)):
            rows = rows[0].chunk(2)[::-1]
        found[our_name] = torch.cat(rows)
    return found


def compare(ours, theirs, architecture, exported, length):
    """Asserts that our model and the model of transformers have the same logits, and the same gradients of a loss
    that ignores a part of one text."""
    vocab_size = ours.config.vocab_size
    tokens = torch.randint(0, vocab_size, (2, length))
    labels = torch.randint(0, vocab_size, (2, length))
    labels[0, length // 3 : 2 * length // 3 + 1] = IGNORED_LABEL
    logits = theirs(tokens, use_cache=False).logits
    assert_close(ours(tokens), logits, f"logits of {length}")
    F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    ours(tokens, labels=labels).backward()
    expected = gradients_by_our_name(architecture, exported, theirs)
    for name, parameter in ours.named_parameters():
        assert_close(parameter.grad, expected[name], f"{name} of {length}")
    theirs.zero_grad()
    ours.zero_grad()


@pytest.mark.parametrize(("layers", "settings", "class_name"), ROWS + ODD)
def test_a_family_is_the_same_model_in_the_class_that_docs_name(
    layers, settings, class_name, tmp_path, monkeypatch, capsys
):
    config = config_of(layers, settings)
    state = random_state(config)
    ours = write_ours(tmp_path / "ours", config, state)
    if not class_name:
        with pytest.raises(
            UserError, match="^transformers does not have a model with .*; --format=pth"
        ):
            write_model(ours, tmp_path / "hf")
        return
    exported = exportable(config)
    architecture = architecture_for(exported)
    assert architecture.class_name == class_name
    write_model(ours, tmp_path / "hf")
    assert_same(read_weights(tmp_path / "hf"), config, state)
    printed = capsys.readouterr().err
    if "not tried: it needs" in printed:
        assert not TRANSFORMERS_5
        return
    assert printed.startswith(
        f"tried: {class_name} of transformers {transformers.__version__} loads "
    )

    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval().double()
    assert type(theirs).__name__ == class_name
    ours = model_of(config, state.get, torch.float64)
    lengths = (37,)
    # In this block, transformers casts to float64 where it would cast to fp32.
    with monkeypatch.context() as exact:
        stand_in = types.SimpleNamespace(**vars(torch) | {"float32": torch.float64})
        exact.setattr(sys.modules[type(theirs).__module__], "torch", stand_in)
        # Gated DeltaNet increases the rounding errors of other layers, so they also compute in float64.
        if config.has_mixer("gdn"):
            lengths = GDN_LENGTHS
            exact.setattr(torch.Tensor, "float", torch.Tensor.double)
        for length in lengths:
            compare(ours, theirs, architecture, exported, length)

    theirs.float().save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    write_model(tmp_path / "theirs", tmp_path / "back", format="pth")
    for folder in ("theirs", "back"):
        assert_same(read_weights(tmp_path / folder), config, state)


def test_the_table_in_docs_names_every_class():
    named = {class_name for _, _, class_name in ROWS}
    assert named - {""} == {architecture.class_name for architecture in ARCHITECTURES}


def test_an_export_that_its_class_can_t_use_is_removed(tmp_path, monkeypatch):
    """If the class of transformers fails with an export, the export is removed and an error is raised. In this test,
    the class fails only when it uses its cache. With trial=False, the export is not tried."""

    def fail(self, tokens, use_cache=True, **how):
        raise RuntimeError("no cache of this kind\nand more")

    monkeypatch.setattr(transformers.MambaForCausalLM, "generate", fail)
    ours = write_ours(tmp_path / "ours", config_of("mamba1", ""))
    message = r"MambaForCausalLM of transformers .*generating .* RuntimeError \(no cache of this kind\); --trial=false"
    with pytest.raises(UserError, match=message):
        write_model(ours, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()
    assert write_model(ours, tmp_path / "hf", trial=False).exists()


def test_an_export_is_not_tried_in_a_transformers_that_is_too_old(tmp_path, monkeypatch):
    def result_of_trial(**different):
        used = dataclasses.replace(architecture_for(GROUPED), **different)
        return try_export(tmp_path, used, GROUPED, write=None)

    older = types.SimpleNamespace(__version__="4.57.6", Mamba2ForCausalLM=None)
    monkeypatch.setitem(sys.modules, "transformers", older)
    assert result_of_trial().startswith(
        "not tried: it needs transformers 5 or newer; the installed transf"
    )
    expected = "not tried: it needs a newer transformers with NewLM; the installed one is"
    assert result_of_trial(class_name="NewLM") == f"{expected} transformers 4.57.6"
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert result_of_trial().startswith(
        "not tried: transformers can't be imported (import of trans"
    )


def test_an_export_pads_with_its_eos(tmp_path):
    """If a tokenizer has no pad token, its export pads with the eos, so that prompts of different lengths can form a
    batch. A pad token of the tokenizer is kept."""
    ours = write_ours(tmp_path / "ours", CONFIGS["mamba2"])
    write_tokenizer(ours)
    file = ours / "tokenizer_config.json"
    own = json.loads(file.read_text())
    for pad, expected in ((None, own["eos_token"]), (own["eos_token"], own["eos_token"])):
        file.write_text(json.dumps({**own, "pad_token": pad}))
        out = write_model(ours, tmp_path / f"hf-{pad}", trial=False)
        tokenizer = transformers.AutoTokenizer.from_pretrained(out)
        assert tokenizer.pad_token == expected
        assert len(tokenizer(["a", "a a a a"], padding=True)["input_ids"]) == 2
