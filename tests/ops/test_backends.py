"""Tests mamba_fsdp.ops.backends: each operator uses the best available backend, messages explain why better ones
can't be used, and a request that can't be met is an error."""

import shutil
import sys
import sysconfig
import types
from unittest.mock import Mock

import pytest
import torch

from mamba_fsdp.conventions import is_torch_2_2
from mamba_fsdp.errors import UserError
from mamba_fsdp.model.config import ModelConfig
from mamba_fsdp.model.spec import operator_uses
from mamba_fsdp.ops import backends, cpp, fused, scan
from mamba_fsdp.ops.backends import OPERATORS, Use, resolve_backends
from mamba_fsdp.settings.resolve import resolve_settings
from tests.support.tiny import resolved

pytestmark = pytest.mark.torch22
PACKAGES = {
    "mamba": ("mamba_ssm", "causal_conv1d"),
    "fla": ("fla", "fla.ops", "fla.ops.gated_delta_rule"),
    "triton": ("triton",),
}
ALL = "mamba fla triton"
needs_c = pytest.mark.skipif(bool(cpp.why_unavailable()), reason="no C compiler")


@pytest.fixture
def install(monkeypatch):
    """Returns a function install(packages), which makes these packages importable, and all other packages of PACKAGES
    not."""

    def install(packages):
        for package, names in PACKAGES.items():
            for name in names:
                module = types.ModuleType(name) if package in packages.split() else None
                monkeypatch.setitem(sys.modules, name, module)

    return install


def choose(setting, device, layers="mamba1,mamba2,gdn,attention", d_model=256, **options):
    """Returns the selection of backends for a model.

    options: fields of Use, and further settings of the model.
    """
    names = ("dtype", "seq_idx", "deterministic", "in_parts")
    use = {"dtype": torch.bfloat16} | {name: options.pop(name) for name in names if name in options}
    uses = operator_uses(ModelConfig(layers=layers, d_model=d_model, **options), **use)
    return resolve_backends(setting, device, uses)


SSM = dict(layers="mamba1,mamba2,gdn")
TRITON = "triton: conv, scan, ssd, norm, loss, mamba1, mamba2; reference: gdn"


@pytest.mark.parametrize(
    "device, packages, options, choice",
    [
        (
            "cuda",
            ALL,
            {},
            "triton: conv, scan, ssd, norm, loss, mamba1, mamba2; fused: gdn; flash: attention",
        ),
        (
            "cuda",
            "",
            {},
            "reference: conv, scan, ssd, gdn, norm, loss; flash: attention; "
            "conv, scan, ssd, norm, loss not triton: triton does not load (",
        ),
        ("cuda", "triton", SSM, TRITON),
        ("cuda", ALL, SSM | dict(deterministic=True), TRITON),
        (
            "cuda",
            "mamba fla",
            SSM | dict(seq_idx=True),
            "fused: conv, ssd, gdn, norm, mamba2; reference: scan, loss; "
            "conv, scan, ssd, norm, loss not triton: triton does not load (",
        ),
        (
            "cuda",
            "mamba",
            dict(layers="mamba1", seq_idx=True),
            "scan not fused: mamba-ssm's scan can't separate documents",
        ),
        (
            "cuda",
            "mamba",
            dict(layers="mamba1", in_parts=True),
            "scan not fused: mamba-ssm's scan can't begin from a state",
        ),
        (
            "cuda",
            "triton",
            dict(layers="mamba2", dtype=torch.float32),
            "ssd not triton: in float32 a program's states are more than",
        ),
        (
            "cuda",
            "mamba",
            dict(layers="mamba1", d_model=5),
            "conv not fused: causal-conv1d takes multiples of 8 channels, not 10",
        ),
        # This input projection has 2 * 64 + 2 * 16 + 4 = 164 rows.
        (
            "cuda",
            "mamba",
            dict(layers="mamba2", d_model=32, headdim=16),
            "mamba2 not fused: mamba-ssm takes multiples of 8 rows of its input projection, not 164",
        ),
        (
            "cuda",
            "",
            dict(layers="gdn"),
            "install -r requirements/fla.txt, which needs torch 2.7 and Triton 3.3",
        ),
        (
            "cuda",
            ALL,
            dict(dtype=torch.float32),
            "attention not flash: FlashAttention takes bf16 and fp16",
        ),
        (
            "cuda",
            "",
            dict(layers="attention", n_head=4, n_kv_head=4, head_dim=60),
            "FlashAttention takes heads of up to 256 channels in multiples of 8, not 60",
        ),
        ("cuda", "", dict(layers="attention", head_dim=264), "in multiples of 8, not 264"),
        (
            "cuda",
            "",
            dict(layers="attention", deterministic=True),
            "of torch 2.2 adds with atomics" if is_torch_2_2() else "flash: attention",
        ),
        *(
            (
                "cuda",
                "mamba",
                dict(layers=layers, d_state=2),
                "takes multiples of 8 channels, not 516",
            )
            for layers in ("mamba1,mamba2", "mamba2,mamba1")  # a backend must support every use
        ),
        (
            "cuda",
            "fla",
            dict(layers="gdn", headdim=16, d_state=257),
            "takes a d_state of up to 256, not 257",
        ),
        (
            "cuda",
            "fla",
            dict(layers="gdn", headdim=16, d_state=256),
            "reference: conv, norm, loss; fused: gdn; ",
        ),
        pytest.param(
            "cpu",
            ALL,
            {"dtype": torch.float32},
            "cpp: conv, scan; reference: ssd, gdn, attention, norm, loss",
            marks=needs_c,
        ),
        (
            "cpu",
            ALL,
            dict(layers="mamba1", dtype=torch.float16),
            "reference: conv, scan, norm, loss; conv, scan not cpp: there is no C for torch.float16",
        ),
    ],
)
def test_auto_takes_the_best_usable_backend(install, device, packages, options, choice):
    """kernels=auto selects the best usable backend of each operator. The message explains why better backends can't
    be used, and does not mention backends of other devices."""
    install(packages)
    assert choice in str(choose("auto", device, **options))


@pytest.mark.parametrize(
    "setting, device, options, choice",
    [
        ("reference", "cpu", {}, "reference: conv, scan, ssd, gdn, attention, norm, loss"),
        # A whole mixer can use a backend only if its parts can use it.
        (
            "scan=reference",
            "cuda",
            SSM,
            "triton: conv, ssd, norm, loss, mamba2; reference: scan; fused: gdn",
        ),
        (
            "mamba2=fused",
            "cuda",
            dict(layers="mamba2,mamba1"),
            "fused: conv, ssd, norm, mamba2; triton: scan, loss",
        ),
        (
            "scan = reference,conv=triton",
            "cuda",
            dict(layers="mamba1"),
            "triton: conv, norm, loss; reference: scan",
        ),
        pytest.param(
            "scan=reference",
            "cpu",
            dict(layers="mamba1"),
            "cpp: conv; reference: scan, norm, loss",
            marks=needs_c,
        ),
    ],
)
def test_a_demand_only_affects_the_named_operators(install, setting, device, options, choice):
    install(ALL)
    assert str(choose(setting, device, **options)) == choice


@pytest.mark.parametrize(
    "setting, device, options, message",
    [
        (
            "fused",
            "cuda",
            dict(d_model=5, layers="mamba1"),
            "conv can't be fused on cuda: causal-conv1d takes multiples of 8 channels, not 10",
        ),
        (
            "norm=reference,mamba2=fused",
            "cuda",
            {},
            "mamba2 can't be fused on cuda: the backend of norm is reference",
        ),
        (
            "norm=fused",
            "cuda",
            dict(deterministic=True),
            "norm can't be fused on cuda: deterministic=true, and ",
        ),
        (
            "gdn=fused",
            "cuda",
            {},
            "gdn can't be fused on cuda: fla.ops.gated_delta_rule does not load (",
        ),
        (
            "fused",
            "cpu",
            {},
            "conv can't be fused on cpu: fused is for cuda devices; kernels=auto takes one that works",
        ),
        (
            "scan=cpp",
            "cpu",
            dict(layers="mamba2"),
            "this model has no scan, only conv, ssd, norm, loss, mamba2",
        ),
        (
            "cpp",
            "cpu",
            dict(layers="attention"),
            "this model has no operator with that backend, only attention, norm, loss",
        ),
    ],
)
def test_a_demand_that_can_not_be_met_is_refused(install, setting, device, options, message):
    install("mamba triton")
    with pytest.raises(UserError) as refused:
        choose(setting, device, **options)
    assert f"kernels={setting}: {message}" in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "setting, message",
    [
        ("tritn", "there is no backend 'tritn'; did you mean triton?"),
        ("cuda", "there is no backend 'cuda'; choose one of auto, "),
        ("scam=cpp", "there is no operator 'scam'; did you mean scan?"),
        ("ssd=cpp", "there is no backend of ssd 'cpp'; choose one of triton, fused, reference"),
        ("scan=", "there is no backend of scan ''"),
        ("scan=cpp,", "there is no operator ''"),
        ("scan=cpp,scan=reference", "give each operator one backend"),
    ],
)
def test_unknown_names_are_refused_with_the_settings(setting, message):
    with pytest.raises(UserError, match="kernels=") as refused:
        resolve_settings({"kernels": setting})
    assert f"kernels={setting}: {message}" in str(refused.value)


@pytest.mark.parametrize(
    "module, name, value, reason",
    [
        (torch.cuda, "get_device_capability", lambda: (7, 5), "8.0 and newer, not 7.5"),
        (shutil, "which", lambda name: None, "Triton finds no C compiler: install gcc"),
        (sysconfig, "get_path", lambda *of: "/no", "install python3-dev, there is no /no/Python.h"),
    ],
)
def test_the_message_explains_why_a_machine_can_not_run_triton(
    install, monkeypatch, module, name, value, reason
):
    """If Triton can't compile kernels on a machine, the message explains why. Otherwise the first launch would fail
    with `max() arg is an empty sequence`, or with an error of gcc."""
    install("triton")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: module is torch.cuda)
    monkeypatch.setattr(module, name, value)
    choice = choose("auto", "cuda", **SSM)
    assert set(choice.backends.values()) == {"reference"}
    assert "conv, scan, ssd, norm, loss not triton: " in str(choice) and reason in str(choice)


def test_measurements_override_the_usual_order(install):
    """A backend in `failed` is skipped with its reason, a backend in `preferred` is tried first, and a backend in
    `assumed` does not need its package."""
    uses = operator_uses(ModelConfig(layers="mamba1"), torch.bfloat16)
    install("mamba triton")
    failed = {("scan", "triton"): "it is off"}
    choice = resolve_backends("auto", "cuda", uses, failed=failed)
    assert str(choice).startswith("triton: conv, norm, loss; fused: scan; ")
    assert "scan not triton: it is off" in str(choice)
    faster = {"conv": "fused", "scan": "fused", "mamba1": "fused", "loss": "fused"}
    choice = resolve_backends("auto", "cuda", uses, preferred=faster)
    assert str(choice) == "fused: conv, scan, mamba1; triton: norm, loss"
    install("")
    choice = resolve_backends("auto", "cuda", uses, assumed=["triton"])
    assert str(choice).startswith("triton: conv, scan, norm, loss, mamba1")


@needs_c
def test_a_new_backend_is_a_module_and_a_name(monkeypatch):
    """A new backend consists of a module and an entry in BACKENDS and OPERATORS. It is considered in the order of
    OPERATORS, its function `why_not` decides whether it can be used, and its other functions are called."""
    toy = types.ModuleType("mamba_fsdp.ops.scan.toy")
    toy.why_not = lambda use: "the toy can't separate documents" if use.seq_idx else None
    toy.selective_scan = lambda *inputs: "toy"
    monkeypatch.setitem(sys.modules, toy.__name__, toy)
    monkeypatch.setitem(backends.BACKENDS, "toy", "cpu")
    monkeypatch.setitem(OPERATORS, "scan", ("toy", *OPERATORS["scan"]))
    monkeypatch.setattr(scan, "BACKENDS", backends.modules("mamba_fsdp.ops.scan"))
    assert choose("auto", "cpu").backends["scan"] == "toy" == choose("toy", "cpu").backends["scan"]
    assert choose("auto", "cuda").backends["scan"] != "toy"
    choice = choose("auto", "cpu", seq_idx=True)
    assert "scan not toy: the toy can't separate documents" in str(choice)
    assert scan.selective_scan(*"udABCDzb", backend="toy") == "toy"
    uses = {"scan": [Use("scan", torch.bfloat16, False)]}
    for demanded, names in (({}, ["toy", "cpp"]), ({"scan": "toy"}, ["toy"])):
        found = backends.candidates(demanded, "cpu", uses)
        assert list(found) == [("scan", name) for name in names]
    assert not backends.use_simpler_form("scan", "toy")
    toy.use_simpler_form = Mock()
    assert backends.use_simpler_form("scan", "toy") and toy.use_simpler_form.called


@pytest.mark.parametrize("bounded", [False, True])
def test_a_mixer_is_a_candidate_if_its_parts_are(install, bounded):
    """A backend is a candidate for a whole mixer only if it is a candidate for all parts of the mixer. The scan of
    mamba-ssm can't separate documents, so the Mamba-1 mixer of mamba-ssm can't separate them either."""
    install("mamba")
    uses = operator_uses(ModelConfig(layers="mamba1"), torch.bfloat16, seq_idx=bounded)
    found = [operator for operator, _ in backends.candidates({}, "cuda", uses)]
    assert found == (["conv", "norm"] if bounded else ["conv", "scan", "norm", "mamba1"])


@pytest.mark.parametrize("batch_size, is_fused", [(32, True), (64, False)])
def test_fused_kernels_are_not_selected_if_their_offsets_are_too_small(batch_size, is_fused):
    """Fused kernels are not selected if a tensor of the run has more elements than their 32-bit offsets can address.
    The input projection of mamba2-2.7b has 2.8e9 elements for 64 x 4,096 tokens."""
    settings = resolved(model_name="mamba2-2.7b", batch_size=batch_size, seq_length=4096)
    uses = settings.operator_uses("cuda")
    faster = dict.fromkeys(uses, "fused")
    choice = resolve_backends("auto", "cuda", uses, ("fused", "triton"), preferred=faster)
    assert ("2^31 elements" not in str(choice)) == is_fused
    assert (choice.backends["mamba2"] == "fused") == is_fused


def test_a_fused_call_with_too_large_offsets_is_refused():
    """check_reach raises an error if the offset of an element is too large for the fused kernels. Offsets count, not
    the number of elements: the elements of a slice are spread over the whole projection."""
    of_projection = 10_576
    fits, exceeds = (
        torch.empty(1, tokens, of_projection, device="meta")[..., :64]
        for tokens in (203_000, 203_100)
    )
    fused.check_reach(fits)
    with pytest.raises(UserError, match="1 x 203,100 tokens .* support 2.31; give fewer"):
        fused.check_reach(exceeds)
