"""Which backend serves which operator: best first; what keeps one away is said, and a demand that can't be met refused."""

import shutil
import sys
import sysconfig
import types

import pytest
import torch

from mamba_fsdp.errors import UserError
from mamba_fsdp.model.config import ModelConfig
from mamba_fsdp.model.spec import operator_uses
from mamba_fsdp.ops import attention, backends, cpp, scan
from mamba_fsdp.ops.backends import MIXER_PARTS, OPERATORS, REFERENCE, Use, resolve_backends
from mamba_fsdp.settings.resolve import resolve_settings

pytestmark = pytest.mark.torch22
EVERYTHING = ModelConfig(layers="mamba1,mamba2,gdn,attention", d_model=256)
TRITON = {operator: "triton" for operator in OPERATORS if "triton" in OPERATORS[operator]}
FUSED = {operator: "fused" for operator in OPERATORS if "fused" in OPERATORS[operator]}
needs_c = pytest.mark.skipif(bool(cpp.why_unavailable()), reason="no C compiler")


def choose(setting, device_type="cpu", config=EVERYTHING, dtype=torch.float32, **asked):
    uses = operator_uses(config, dtype, **{"seq_idx": False, "deterministic": False, **asked})
    return resolve_backends(setting, device_type, uses)


@pytest.fixture(autouse=True)
def older_torch(monkeypatch):
    """Without attention of all documents in one call, whatever torch this is."""
    flash = attention.BACKENDS["flash"]
    monkeypatch.setattr(flash, "why_unavailable", lambda: "there is none", raising=False)


@pytest.fixture
def kernels(monkeypatch):
    """Triton and CUDA libraries that load."""
    for name in (
        "mamba_ssm",
        "causal_conv1d",
        "fla",
        "fla.ops",
        "fla.ops.gated_delta_rule",
        "triton",
    ):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))


@pytest.fixture
def libraries(kernels, monkeypatch):
    """CUDA libraries that load, and no Triton."""
    monkeypatch.setitem(sys.modules, "triton", None)


@needs_c
def test_a_cpu_gets_c_where_there_is_some():
    choice = choose("auto")
    assert choice.backends == REFERENCE | {"conv": "cpp", "scan": "cpp"}
    assert str(choice) == "cpp: conv, scan; reference: ssd, gdn, attention, norm, loss"
    assert choose("auto", deterministic=True) == choice
    half = choose("auto", dtype=torch.float16)
    assert half.backends == REFERENCE
    assert str(half).endswith("; conv, scan not cpp: there is no C for torch.float16")


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_the_reference_serves_everywhere(kernels, device_type):
    choice = choose("reference", device_type)
    assert choice.backends == REFERENCE
    assert str(choice) == "reference: conv, scan, ssd, gdn, attention, norm, loss"


def test_a_gpu_gets_the_libraries_and_whole_mixers(libraries):
    choice = choose("auto", "cuda", dtype=torch.bfloat16)
    assert str(choice).startswith(
        "fused: conv, scan, ssd, gdn, norm, mamba1, mamba2; reference: attention, loss"
    )
    assert choose("fused", "cuda").backends == choice.backends == REFERENCE | FUSED


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("seq_idx", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_gpu_gets_triton_where_it_is_preferred(kernels, dtype, seq_idx, deterministic):
    uses = operator_uses(EVERYTHING, dtype, seq_idx, deterministic)
    choice = resolve_backends("auto", "cuda", uses, preferred=dict.fromkeys(uses, "triton"))
    second = "reference" if deterministic else "fused"
    expected = REFERENCE | TRITON | {"gdn": second}
    if dtype == torch.float32:
        del expected["mamba2"]
        expected["ssd"] = second
        assert "ssd not triton: in float32 a program's states are more than" in str(choice)
    assert choice.backends == expected


@pytest.mark.parametrize(
    "lacking, said",
    [
        ("capability", "its kernels are for GPUs of compute capability 8.0 and newer, not 7.5"),
        ("compiler", "Triton finds no C compiler: install gcc"),
        (
            "headers",
            "Triton needs Python's headers: install python3-dev, there is no /nowhere/Python.h",
        ),
    ],
)
def test_a_machine_that_can_not_run_triton_is_told_why(kernels, monkeypatch, lacking, said):
    """What would otherwise end the first launch: `max() arg is an empty sequence`, an error of gcc."""
    if lacking == "capability":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    if lacking == "compiler":
        monkeypatch.setattr(shutil, "which", lambda name: None)
        monkeypatch.delenv("CC", raising=False)
    if lacking == "headers":
        monkeypatch.setattr(sysconfig, "get_path", lambda name, scheme: "/nowhere")
    choice = choose("auto", "cuda", dtype=torch.bfloat16, deterministic=True)
    assert choice.backends == REFERENCE and f"conv, scan, ssd, norm not triton: {said}" in str(
        choice
    )


def test_attention_of_a_gpu_is_flash_where_torch_has_it(kernels, monkeypatch):
    assert "attention not flash: there is none" in str(choose("auto", "cuda"))
    monkeypatch.setattr(attention.BACKENDS["flash"], "why_unavailable", lambda: None)
    assert choose("auto", "cuda", dtype=torch.bfloat16).backends["attention"] == "flash"
    assert choose("auto", "cpu", dtype=torch.bfloat16).backends["attention"] == "reference"
    said = "attention not flash: FlashAttention takes bf16 and fp16"
    assert said in str(choose("auto", "cuda"))
    odd = ModelConfig(layers="attention", d_model=240, n_head=4, n_kv_head=4)
    said = "attention not flash: FlashAttention takes heads of up to 256 channels in multiples of 8"
    assert said in str(choose("auto", "cuda", odd, torch.bfloat16))


def test_what_was_found_wrong_is_passed_over(kernels):
    uses = operator_uses(EVERYTHING, torch.bfloat16)
    choice = resolve_backends("auto", "cuda", uses, failed={("scan", "fused"): "it is off"})
    assert choice.backends.pop("mamba2") == "fused" and "mamba1" not in choice.backends
    fused = dict.fromkeys(("conv", "ssd", "gdn", "norm"), "fused")
    assert choice.backends == REFERENCE | fused | {"scan": "triton"}
    assert "scan not fused: it is off" in str(choice)


def test_what_is_missing_on_a_gpu_is_named(libraries, monkeypatch):
    for package in ("causal_conv1d", "fla.ops.gated_delta_rule"):
        monkeypatch.setitem(sys.modules, package, None)
    choice = choose("auto", "cuda")
    assert choice.backends == REFERENCE
    assert "conv, scan, ssd, norm not fused: causal_conv1d does not load (" in str(choice)
    assert "gdn not fused: fla.ops.gated_delta_rule does not load (" in str(choice)
    assert "install -r requirements/fla.txt, which needs torch 2.7 and Triton 3.3" in str(choice)
    with pytest.raises(UserError, match="conv can't be fused on cuda: causal_conv1d does not load"):
        choose("fused", "cuda")


def refuse(setting, said, device_type="cuda", **asked):
    with pytest.raises(UserError) as refused:
        choose(setting, device_type, **asked)
    assert f"kernels={setting}: {said}" in str(refused.value) and "\n" not in str(refused.value)


def test_what_the_libraries_do_not_take_is_refused_at_the_start(libraries):
    """Channels that are not a multiple of 8 keep causal-conv1d away, so many heads the whole mixer, boundaries mamba-ssm's
    Mamba-1; what is not known to repeat keeps away from deterministic runs."""
    narrow = ModelConfig(layers="mamba1", d_model=5)  # d_inner 10
    said = "causal-conv1d takes multiples of 8 channels, not 10"
    refuse("fused", f"conv can't be fused on cuda: {said}", config=narrow)
    choice = choose("auto", "cuda", config=narrow)
    expected = {"conv": "reference", "scan": "fused", "norm": "fused", "loss": "reference"}
    assert choice.backends == expected and f"conv not fused: {said}" in str(choice)
    heads = ModelConfig(layers="mamba2", d_model=32, headdim=16)  # 2 * 64 + 2 * 16 + 4 rows
    said = "mamba-ssm takes multiples of 8 rows of its input projection, not 164"
    refuse("fused", f"mamba2 can't be fused on cuda: {said}", config=heads)
    assert "mamba2" not in choose("auto", "cuda", config=heads).backends
    mamba1, mamba2 = (ModelConfig(layers=layer, d_model=256) for layer in ("mamba1", "mamba2"))
    said = "mamba-ssm's scan can't separate documents"
    refuse("fused", f"scan can't be fused on cuda: {said}", config=mamba1, seq_idx=True)
    assert choose("auto", "cuda", config=mamba1, seq_idx=True).backends["scan"] == "reference"
    assert choose("fused", "cuda", config=mamba2, seq_idx=True).backends["mamba2"] == "fused"
    wide = ModelConfig(layers="gdn", d_model=64, headdim=16, d_state=264)
    said = "flash-linear-attention takes a d_state of up to 256, not 264"
    refuse("gdn=fused", f"gdn can't be fused on cuda: {said}", config=wide)
    assert choose("auto", "cuda", deterministic=True).backends == REFERENCE
    said = "norm can't be fused on cuda: deterministic=true, and "
    refuse("norm=fused", said, deterministic=True)


def test_a_backend_that_is_demanded_of_a_part_holds_in_the_whole(libraries):
    """A mixer runs in one call only where that has its parts' backend."""
    choice = choose("scan=reference", "cuda")
    assert choice.backends["scan"] == "reference" and "mamba1" not in choice.backends
    assert choice.backends["mamba2"] == "fused"
    refuse("norm=reference,mamba2=fused", "mamba2 can't be fused on cuda: its norm is reference")


def test_a_backend_of_another_device_is_refused(libraries):
    said = "conv can't be fused on cpu: it is for cuda devices; kernels=auto takes one that works"
    refuse("fused", said, "cpu")
    refuse("conv=cpp", "conv can't be cpp on cuda: it is for cpu devices")


@needs_c
@pytest.mark.parametrize("setting", ["scan=reference, conv=cpp", "scan=reference"])
def test_a_list_demands_of_the_named_and_leaves_the_rest(setting):
    said = "cpp: conv; reference: scan, ssd, gdn, attention, norm, loss"
    assert str(choose(setting)) == said


@pytest.mark.parametrize(
    "setting, said",
    [
        ("tritn", "there is no backend 'tritn'; did you mean triton?"),
        ("cuda", "there is no backend 'cuda'; choose one of auto, "),
        ("scam=cpp", "there is no operator 'scam'; did you mean scan?"),
        ("ssd=cpp", "there is no backend of ssd 'cpp'; choose one of fused, triton, reference"),
        ("scan=", "there is no backend of scan ''"),
        ("scan=cpp,", "there is no operator ''"),
        ("scan=cpp,scan=reference", "give each operator one backend"),
    ],
)
def test_names_that_there_are_not_are_refused_with_the_settings(setting, said):
    with pytest.raises(UserError, match="kernels=") as refused:
        resolve_settings({"kernels": setting})
    assert f"kernels={setting}: {said}" in str(refused.value)


def test_a_demand_on_nothing_is_refused():
    """An operator that the model does not have, and a backend that none of its operators has."""
    said = "this model has no scan, only conv, ssd, norm, loss, mamba2"
    refuse("scan=cpp", said, "cpu", config=ModelConfig(layers="mamba2"))
    said = "this model has no operator with that backend, only attention, norm, loss"
    refuse("cpp", said, "cpu", config=ModelConfig(layers="attention"))


def test_a_new_backend_is_a_module_and_a_name(monkeypatch):
    """A toy backend of the scan is chosen best first, asked what it can do, and called."""
    toy = types.ModuleType("mamba_fsdp.ops.scan.toy")
    toy.why_not = lambda use: "the toy can't separate documents" if use.seq_idx else None
    toy.selective_scan = lambda u, *rest: u * 0 + 7
    monkeypatch.setitem(sys.modules, toy.__name__, toy)
    monkeypatch.setitem(backends.BACKENDS, "toy", "cpu")
    monkeypatch.setitem(backends.OPERATORS, "scan", ("toy", *OPERATORS["scan"]))
    monkeypatch.setattr(scan, "BACKENDS", backends.modules("mamba_fsdp.ops.scan"))
    assert choose("auto").backends["scan"] == "toy" == choose("toy").backends["scan"]
    assert choose("auto", "cuda").backends["scan"] != "toy"
    assert "scan not toy: the toy can't separate documents" in str(choose("auto", seq_idx=True))
    x = torch.ones(1, 3, 4)
    of_channels = torch.ones(4)
    given = (x, x, -torch.ones(4, 2), x[..., :2], x[..., :2], of_channels, x, of_channels)
    y = scan.selective_scan(*given, backend="toy")
    assert (y == 7).all()


def test_a_backend_must_serve_every_use(libraries):
    fits, other = (Use("conv", torch.bfloat16, False, channels=channels) for channels in (64, 60))
    assert resolve_backends("auto", "cuda", {"conv": [fits]}).backends == {"conv": "fused"}
    for uses in ([fits, other], [other, fits]):
        assert resolve_backends("auto", "cuda", {"conv": uses}).backends == {"conv": "reference"}


def test_every_operator_ends_with_its_reference():
    for operator, names in OPERATORS.items():
        assert (names[-1] == "reference") == (operator not in MIXER_PARTS)
