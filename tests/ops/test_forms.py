"""Which form serves which operator: best first; what keeps one away is said, and a demand that can't be met refused."""

import subprocess
import sys
import types
from functools import partial

import pytest
import torch

from config.model_config import ModelConfig
from config.resolve import resolve_settings
from mamba_fsdp.errors import UserError
from mamba_fsdp.model.spec import operator_uses
from mamba_fsdp.ops import forms, native, scan
from mamba_fsdp.ops.forms import OPERATORS, PORTABLE, Use, demands, resolve_forms

pytestmark = pytest.mark.torch22
EVERYTHING = ModelConfig(layers="mamba1,mamba2,attention", d_model=256)
needs_c = pytest.mark.skipif(
    bool(native.why_unavailable()), reason=f"no C form: {native.why_unavailable()}"
)


def choose(
    setting,
    device_type="cpu",
    config=EVERYTHING,
    dtype=torch.float32,
    documents=False,
    deterministic=False,
):
    return resolve_forms(
        setting, device_type, operator_uses(config, dtype, documents, deterministic)
    )


def refusal(*arguments, **more):
    with pytest.raises(UserError) as refused:
        choose(*arguments, **more)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.fixture
def libraries(monkeypatch):
    """CUDA libraries that load, and no Triton."""
    for name in ("mamba_ssm", "causal_conv1d"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "triton", None)


@pytest.fixture
def kernels(libraries, monkeypatch):
    """Triton and CUDA libraries that load."""
    monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))


TRITON = [operator for operator in OPERATORS if "triton" in OPERATORS[operator]]
FUSED = {
    "conv": "fused",
    "scan": "fused",
    "ssd": "fused",
    "norm": "fused",
    "mamba1": "fused",
    "mamba2": "fused",
}


def with_triton(forms):
    """The same choice where Triton loads."""
    return {operator: "triton" if operator in TRITON else form for operator, form in forms.items()}


def test_every_form_answers_what_it_is_asked():
    """Each form but the portable one says why it is unavailable, and the portable one comes last."""
    for operator, names in OPERATORS.items():
        assert (names[-1] == "portable") == (operator not in forms.WHOLE)
        for form in set(names) - {"portable"}:
            reason = forms.why_unavailable(operator, form)
            assert reason is None or (reason and "\n" not in reason)


@needs_c
def test_a_cpu_gets_c_where_there_is_some():
    choice = choose("auto")
    assert choice.forms == PORTABLE | {"conv": "native", "scan": "native"}
    assert str(choice) == "native: conv, scan; portable: ssd, attention, norm, loss"


def test_portable_is_portable(libraries):
    for device_type in ("cpu", "cuda"):
        choice = choose("portable", device_type)
        assert (
            choice.forms == PORTABLE
            and str(choice) == "portable: conv, scan, ssd, attention, norm, loss"
        )


def test_a_gpu_gets_the_libraries_and_whole_mixers(libraries):
    choice = choose("auto", "cuda", dtype=torch.bfloat16)
    assert str(choice).startswith(
        "fused: conv, scan, ssd, norm, mamba1, mamba2; portable: attention, loss"
    )
    assert choose("fused", "cuda").forms == choice.forms == PORTABLE | FUSED
    assert all(set(passed) <= {"triton"} for passed in choice.passed.values())


def test_a_gpu_gets_triton_before_the_libraries(kernels):
    """In bf16, fp32 and fp16, with documents or not, whether results must repeat or not."""
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        for documents in (False, True):
            for deterministic in (False, True):
                choice = choose(
                    "auto", "cuda", dtype=dtype, documents=documents, deterministic=deterministic
                )
                assert {
                    operator: choice.forms.get(operator) for operator in TRITON
                } == dict.fromkeys(TRITON, "triton")
    assert choose("fused", "cuda").forms == PORTABLE | FUSED | {"loss": "triton"}


def test_triton_needs_no_library_and_says_when_it_does_not_load(kernels, monkeypatch):
    for name in ("mamba_ssm", "causal_conv1d"):
        monkeypatch.setitem(sys.modules, name, None)
    choice = choose("auto", "cuda", deterministic=True)
    assert {
        operator: form for operator, form in choice.forms.items() if form != "portable"
    } == dict.fromkeys(TRITON, "triton")
    monkeypatch.setitem(sys.modules, "triton", None)
    assert choose("auto", "cuda").forms == PORTABLE
    if TRITON:
        assert f"{TRITON[0]} can't be triton on cuda: triton does not load (" in refusal(
            "triton", "cuda"
        )
        assert "can't be triton on cpu: it is for cuda devices" in refusal("triton")


def test_what_was_measured_faster_on_this_gpu_comes_first(kernels, monkeypatch):
    """By the GPU's name; a demand still holds, and what can't serve is passed over."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(
        forms,
        "MEASURED",
        {
            "NVIDIA H200": {"norm": "portable", "conv": "fused"},
            "NVIDIA A100-SXM4-80GB": {"norm": "fused"},
        },
    )
    choice = choose("auto", "cuda")
    assert (
        choice.forms["norm"] == "portable"
        and choice.forms["conv"] == "fused"
        and choice.passed["norm"] == {}
    )
    assert choose("norm=fused", "cuda").forms["norm"] == "fused"
    assert "conv not fused: deterministic=true" in str(choose("auto", "cuda", deterministic=True))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100-SXM4-80GB")
    assert choose("auto", "cuda").forms["norm"] == "fused"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose("auto", "cuda").forms == choose("auto", "cuda").forms | dict.fromkeys(
        TRITON, "triton"
    )


def test_measured_names_what_there_is():
    for measured in forms.MEASURED.values():
        assert all(form in OPERATORS[operator] for operator, form in measured.items())


def test_what_is_missing_on_a_gpu_is_named(libraries, monkeypatch):
    """auto says why it falls back, operator by operator; fused refuses with the package's name."""
    monkeypatch.setitem(sys.modules, "causal_conv1d", None)
    choice = choose("auto", "cuda")
    assert choice.forms == PORTABLE | {"scan": "fused", "ssd": "fused", "norm": "fused"}
    assert "conv not fused: causal_conv1d does not load (" in str(choice)
    assert (
        "mamba1" not in choice.forms and "fused" not in choice.passed["mamba1"]
    )  # the part has said why
    assert "kernels=fused: conv can't be fused on cuda: causal_conv1d does not load" in refusal(
        "fused", "cuda"
    )
    assert choose("scan=fused,ssd=fused", "cuda").forms["scan"] == "fused"


def test_what_the_libraries_do_not_take_is_refused_at_the_start(libraries):
    """Channels that are no multiple of 8 keep causal-conv1d away, so many heads the whole mixer, boundaries mamba-ssm's
    Mamba-1."""
    narrow = ModelConfig(layers="mamba1", d_model=5)  # d_inner 10
    assert (
        "conv can't be fused on cuda: causal-conv1d takes multiples of 8 channels, not 10"
        in refusal("fused", "cuda", config=narrow)
    )
    choice = choose("auto", "cuda", config=narrow)
    assert choice.forms == {
        "conv": "portable",
        "scan": "fused",
        "norm": "fused",
        "loss": "portable",
    }
    assert "conv not fused: causal-conv1d takes" in str(choice)
    heads = ModelConfig(
        layers="mamba2", d_model=32, headdim=16
    )  # 4 heads: 2 * 64 + 2 * 16 + 4 rows
    said = refusal("fused", "cuda", config=heads)
    assert (
        "mamba2 can't be fused on cuda: mamba-ssm takes multiples of 8 rows of its input projection, not 164"
        in said
    )
    choice = choose("auto", "cuda", config=heads)
    assert choice.forms == {"conv": "fused", "ssd": "fused", "norm": "fused", "loss": "portable"}
    assert "mamba2 not fused: mamba-ssm takes multiples of 8" in str(choice)
    mamba1, mamba2 = (ModelConfig(layers=layer, d_model=256) for layer in ("mamba1", "mamba2"))
    assert "scan can't be fused on cuda: mamba-ssm's scan keeps no documents apart" in refusal(
        "fused", "cuda", config=mamba1, documents=True
    )
    choice = choose("auto", "cuda", config=mamba1, documents=True)
    assert choice.forms == {
        "conv": "fused",
        "scan": "portable",
        "norm": "fused",
        "loss": "portable",
    }
    assert choose("fused", "cuda", config=mamba2, documents=True).forms["mamba2"] == "fused"


def test_triton_norms_rows_that_a_block_holds(kernels):
    wide = partial(ModelConfig, layers="mamba2", d_model=65536)
    assert (
        "norm can't be triton on cuda: its kernels take up to 65536 channels, not 131072"
        in refusal("norm=triton", "cuda", config=wide())
    )
    assert choose("auto", "cuda", config=wide(ngroups=2)).forms["norm"] == "triton"
    assert (
        choose("auto", "cuda", config=ModelConfig(layers="mamba1", d_model=65537)).forms["norm"]
        != "triton"
    )


def test_a_deterministic_run_takes_what_repeats(libraries):
    """On a GPU no library is known to; on a CPU every form does."""
    choice = choose("auto", "cuda", deterministic=True)
    assert choice.forms == PORTABLE
    for operator in ("conv", "scan", "ssd", "norm"):
        assert choice.passed[operator]["fused"].startswith("deterministic=true, and ")
        assert f"{operator} can't be fused on cuda: deterministic=true, and " in refusal(
            f"{operator}=fused", "cuda", deterministic=True
        )
    for mixer in forms.WHOLE:
        assert f"{mixer} can't be fused on cuda: its conv is portable" in refusal(
            f"{mixer}=fused", "cuda", deterministic=True
        )
    assert choose("auto", deterministic=True) == choose("auto")


def test_a_form_that_is_demanded_of_a_part_holds_in_the_whole(libraries):
    """A mixer runs in one call only where that has its parts' form."""
    choice = choose("scan=portable", "cuda")
    assert (
        choice.forms["scan"] == "portable"
        and "mamba1" not in choice.forms
        and choice.forms["mamba2"] == "fused"
    )
    assert "mamba1 can't be fused on cuda: its scan is portable" in refusal(
        "scan=portable,mamba1=fused", "cuda"
    )
    assert "mamba2 can't be fused on cuda: its norm is portable" in refusal(
        "norm=portable,mamba2=fused", "cuda"
    )


def test_a_form_of_another_device_is_refused(libraries):
    assert (
        "kernels=fused: conv can't be fused on cpu: it is for cuda devices; kernels=auto"
        in refusal("fused")
    )
    assert "kernels=conv=native: conv can't be native on cuda: it is for cpu devices" in refusal(
        "conv=native", "cuda"
    )


@needs_c
def test_a_list_demands_of_the_named_and_leaves_the_rest():
    assert (
        str(choose("scan=portable, conv=native"))
        == "native: conv; portable: scan, ssd, attention, norm, loss"
    )
    assert choose("scan=portable").forms["conv"] == "native"


@needs_c
def test_what_c_does_not_take_is_said():
    """fp16 on a CPU: auto takes the portable forms and says so, native is refused."""
    choice = choose("auto", dtype=torch.float16)
    assert choice.forms == PORTABLE and str(choice).endswith(
        "; conv, scan not native: there is no C for torch.float16"
    )
    assert "conv can't be native on cpu: there is no C for torch.float16" in refusal(
        "native", dtype=torch.float16
    )


@pytest.mark.parametrize(
    "setting, said",
    [
        ("nativ", "there is no form 'nativ'; did you mean native?"),
        ("cuda", "there is no form 'cuda'; choose one of auto, "),
        ("scam=native", "there is no operator 'scam'; did you mean scan?"),
        ("scan=nativ", "there is no form of scan 'nativ'; did you mean native?"),
        (
            "ssd=native",
            f"there is no form of ssd 'native'; choose one of {', '.join(OPERATORS['ssd'])}",
        ),
        ("scan=", "there is no form of scan ''"),
        ("scan=native,", "there is no operator ''"),
        ("scan=native,scan=portable", "give each operator one form"),
    ],
)
def test_names_that_there_are_not_are_refused_with_the_settings(setting, said):
    """Before anything is built: with the nearest name, or all."""
    with pytest.raises(UserError, match="kernels=") as refused:
        resolve_settings({"kernels": setting})
    assert f"kernels={setting}: {said}" in str(refused.value)


def test_names_are_checked_without_torch(project):
    code = (
        "import sys; from config.resolve import resolve_settings; resolve_settings({'kernels': 'scan=native'}); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=project).returncode == 0


def test_a_demand_on_nothing_is_refused():
    """An operator that the model does not have, and a form that none of its operators has."""
    mamba2, llama = ModelConfig(layers="mamba2"), ModelConfig(layers="attention")
    assert (
        "kernels=scan=native: this model has no scan, only conv, ssd, norm, loss, mamba2"
        in refusal("scan=native", config=mamba2)
    )
    assert (
        "kernels=native: this model has no operator of that form, only attention, norm, loss"
        in refusal("native", config=llama)
    )
    assert demands("scan=native") == {"scan": "native"}


def test_a_new_form_is_a_module_and_a_name(monkeypatch):
    """A toy form of the scan is chosen best first, asked what it takes, and called."""
    toy = types.ModuleType("mamba_fsdp.ops.scan.toy")
    toy.why_unavailable = lambda: None
    toy.takes = lambda use: "the toy keeps no documents apart" if use.documents else None
    toy.selective_scan = lambda u, *rest: u * 0 + 7
    monkeypatch.setitem(sys.modules, toy.__name__, toy)
    monkeypatch.setitem(forms.FORMS, "toy", "cpu")
    monkeypatch.setitem(forms.OPERATORS, "scan", ("toy", *OPERATORS["scan"]))
    monkeypatch.setattr(scan, "FORMS", forms.modules("mamba_fsdp.ops.scan"))
    assert choose("auto").forms["scan"] == "toy" == choose("toy").forms["scan"]
    assert choose("auto", "cuda").forms["scan"] != "toy"
    bounded = choose("auto", documents=True)
    assert bounded.forms[
        "scan"
    ] != "toy" and "scan not toy: the toy keeps no documents apart" in str(bounded)
    x = torch.ones(1, 3, 4)
    assert (
        scan.selective_scan(x, x, -torch.ones(4, 2), x[..., :2], x[..., :2], form="toy") == 7
    ).all()


def test_a_form_must_take_every_use(libraries):
    """One form serves all of a model's calls of an operator."""
    fits, other = (Use("conv", torch.bfloat16, False, channels=channels) for channels in (64, 60))
    assert resolve_forms("auto", "cuda", {"conv": [fits]}).forms == {"conv": "fused"}
    for uses in ([fits, other], [other, fits]):
        assert resolve_forms("auto", "cuda", {"conv": uses}).forms == {"conv": "portable"}
