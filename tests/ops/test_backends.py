"""Which backend serves which operator: best first; what keeps one away is said, and a demand that can't be met refused."""

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
from mamba_fsdp.ops import backends, cpp, scan
from mamba_fsdp.ops.backends import OPERATORS, REFERENCE, Use, demands, resolve_backends

pytestmark = pytest.mark.torch22
EVERYTHING = ModelConfig(layers="mamba1,mamba2,attention", d_model=256)
needs_c = pytest.mark.skipif(
    bool(cpp.why_unavailable()), reason=f"no C backend: {cpp.why_unavailable()}"
)


def choose(
    setting,
    device_type="cpu",
    config=EVERYTHING,
    dtype=torch.float32,
    seq_idx=False,
    deterministic=False,
):
    return resolve_backends(
        setting, device_type, operator_uses(config, dtype, seq_idx, deterministic)
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


def with_triton(backends):
    """The same choice where Triton loads."""
    return {
        operator: "triton" if operator in TRITON else backend
        for operator, backend in backends.items()
    }


def test_every_form_answers_what_it_is_asked():
    """Each backend but the reference one says why it is unavailable, and the reference one comes last."""
    for operator, names in OPERATORS.items():
        assert (names[-1] == "reference") == (operator not in backends.WHOLE)
        for backend in set(names) - {"reference"}:
            reason = backends.why_unavailable(operator, backend)
            assert reason is None or (reason and "\n" not in reason)


@needs_c
def test_a_cpu_gets_c_where_there_is_some():
    choice = choose("auto")
    assert choice.backends == REFERENCE | {"conv": "cpp", "scan": "cpp"}
    assert str(choice) == "cpp: conv, scan; reference: ssd, attention, norm, loss"


def test_portable_is_portable(libraries):
    for device_type in ("cpu", "cuda"):
        choice = choose("reference", device_type)
        assert (
            choice.backends == REFERENCE
            and str(choice) == "reference: conv, scan, ssd, attention, norm, loss"
        )


def test_a_gpu_gets_the_libraries_and_whole_mixers(libraries):
    choice = choose("auto", "cuda", dtype=torch.bfloat16)
    assert str(choice).startswith(
        "fused: conv, scan, ssd, norm, mamba1, mamba2; reference: attention, loss"
    )
    assert choose("fused", "cuda").backends == choice.backends == REFERENCE | FUSED
    assert all(set(passed) <= {"triton"} for passed in choice.passed.values())


def test_a_gpu_gets_triton_before_the_libraries(kernels):
    """In bf16, fp32 and fp16, with documents or not, whether results must repeat or not."""
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        for seq_idx in (False, True):
            for deterministic in (False, True):
                choice = choose(
                    "auto", "cuda", dtype=dtype, seq_idx=seq_idx, deterministic=deterministic
                )
                assert {
                    operator: choice.backends.get(operator) for operator in TRITON
                } == dict.fromkeys(TRITON, "triton")
    assert choose("fused", "cuda").backends == REFERENCE | FUSED | {"loss": "triton"}


def test_triton_needs_no_library_and_says_when_it_does_not_load(kernels, monkeypatch):
    for name in ("mamba_ssm", "causal_conv1d"):
        monkeypatch.setitem(sys.modules, name, None)
    choice = choose("auto", "cuda", deterministic=True)
    assert {
        operator: backend for operator, backend in choice.backends.items() if backend != "reference"
    } == dict.fromkeys(TRITON, "triton")
    monkeypatch.setitem(sys.modules, "triton", None)
    assert choose("auto", "cuda").backends == REFERENCE
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
        backends,
        "MEASURED",
        {
            "NVIDIA H200": {"norm": "reference", "conv": "fused"},
            "NVIDIA A100-SXM4-80GB": {"norm": "fused"},
        },
    )
    choice = choose("auto", "cuda")
    assert (
        choice.backends["norm"] == "reference"
        and choice.backends["conv"] == "fused"
        and choice.passed["norm"] == {}
    )
    assert choose("norm=fused", "cuda").backends["norm"] == "fused"
    assert "conv not fused: deterministic=true" in str(choose("auto", "cuda", deterministic=True))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100-SXM4-80GB")
    assert choose("auto", "cuda").backends["norm"] == "fused"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose("auto", "cuda").backends == choose("auto", "cuda").backends | dict.fromkeys(
        TRITON, "triton"
    )


def test_measured_names_what_there_is():
    for measured in backends.MEASURED.values():
        assert all(backend in OPERATORS[operator] for operator, backend in measured.items())


def test_what_is_missing_on_a_gpu_is_named(libraries, monkeypatch):
    """auto says why it falls back, operator by operator; fused refuses with the package's name."""
    monkeypatch.setitem(sys.modules, "causal_conv1d", None)
    choice = choose("auto", "cuda")
    assert choice.backends == REFERENCE | {"scan": "fused", "ssd": "fused", "norm": "fused"}
    assert "conv not fused: causal_conv1d does not load (" in str(choice)
    assert (
        "mamba1" not in choice.backends and "fused" not in choice.passed["mamba1"]
    )  # the part has said why
    assert "kernels=fused: conv can't be fused on cuda: causal_conv1d does not load" in refusal(
        "fused", "cuda"
    )
    assert choose("scan=fused,ssd=fused", "cuda").backends["scan"] == "fused"


def test_what_the_libraries_do_not_take_is_refused_at_the_start(libraries):
    """Channels that are no multiple of 8 keep causal-conv1d away, so many heads the whole mixer, boundaries mamba-ssm's
    Mamba-1."""
    narrow = ModelConfig(layers="mamba1", d_model=5)  # d_inner 10
    assert (
        "conv can't be fused on cuda: causal-conv1d takes multiples of 8 channels, not 10"
        in refusal("fused", "cuda", config=narrow)
    )
    choice = choose("auto", "cuda", config=narrow)
    assert choice.backends == {
        "conv": "reference",
        "scan": "fused",
        "norm": "fused",
        "loss": "reference",
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
    assert choice.backends == {
        "conv": "fused",
        "ssd": "fused",
        "norm": "fused",
        "loss": "reference",
    }
    assert "mamba2 not fused: mamba-ssm takes multiples of 8" in str(choice)
    mamba1, mamba2 = (ModelConfig(layers=layer, d_model=256) for layer in ("mamba1", "mamba2"))
    assert "scan can't be fused on cuda: mamba-ssm's scan keeps no documents apart" in refusal(
        "fused", "cuda", config=mamba1, seq_idx=True
    )
    choice = choose("auto", "cuda", config=mamba1, seq_idx=True)
    assert choice.backends == {
        "conv": "fused",
        "scan": "reference",
        "norm": "fused",
        "loss": "reference",
    }
    assert choose("fused", "cuda", config=mamba2, seq_idx=True).backends["mamba2"] == "fused"


def test_triton_norms_rows_that_a_block_holds(kernels):
    wide = partial(ModelConfig, layers="mamba2", d_model=65536)
    assert (
        "norm can't be triton on cuda: its kernels take up to 65536 channels, not 131072"
        in refusal("norm=triton", "cuda", config=wide())
    )
    assert choose("auto", "cuda", config=wide(ngroups=2)).backends["norm"] == "triton"
    assert (
        choose("auto", "cuda", config=ModelConfig(layers="mamba1", d_model=65537)).backends["norm"]
        != "triton"
    )


def test_a_deterministic_run_takes_what_repeats(libraries):
    """On a GPU no library is known to; on a CPU every backend does."""
    choice = choose("auto", "cuda", deterministic=True)
    assert choice.backends == REFERENCE
    for operator in ("conv", "scan", "ssd", "norm"):
        assert choice.passed[operator]["fused"].startswith("deterministic=true, and ")
        assert f"{operator} can't be fused on cuda: deterministic=true, and " in refusal(
            f"{operator}=fused", "cuda", deterministic=True
        )
    for mixer in backends.WHOLE:
        assert f"{mixer} can't be fused on cuda: its conv is reference" in refusal(
            f"{mixer}=fused", "cuda", deterministic=True
        )
    assert choose("auto", deterministic=True) == choose("auto")


def test_a_form_that_is_demanded_of_a_part_holds_in_the_whole(libraries):
    """A mixer runs in one call only where that has its parts' backend."""
    choice = choose("scan=reference", "cuda")
    assert (
        choice.backends["scan"] == "reference"
        and "mamba1" not in choice.backends
        and choice.backends["mamba2"] == "fused"
    )
    assert "mamba1 can't be fused on cuda: its scan is reference" in refusal(
        "scan=reference,mamba1=fused", "cuda"
    )
    assert "mamba2 can't be fused on cuda: its norm is reference" in refusal(
        "norm=reference,mamba2=fused", "cuda"
    )


def test_a_form_of_another_device_is_refused(libraries):
    assert (
        "kernels=fused: conv can't be fused on cpu: it is for cuda devices; kernels=auto"
        in refusal("fused")
    )
    assert "kernels=conv=cpp: conv can't be cpp on cuda: it is for cpu devices" in refusal(
        "conv=cpp", "cuda"
    )


@needs_c
def test_a_list_demands_of_the_named_and_leaves_the_rest():
    assert (
        str(choose("scan=reference, conv=cpp"))
        == "cpp: conv; reference: scan, ssd, attention, norm, loss"
    )
    assert choose("scan=reference").backends["conv"] == "cpp"


@needs_c
def test_what_c_does_not_take_is_said():
    """fp16 on a CPU: auto takes the reference backends and says so, cpp is refused."""
    choice = choose("auto", dtype=torch.float16)
    assert choice.backends == REFERENCE and str(choice).endswith(
        "; conv, scan not cpp: there is no C for torch.float16"
    )
    assert "conv can't be cpp on cpu: there is no C for torch.float16" in refusal(
        "cpp", dtype=torch.float16
    )


@pytest.mark.parametrize(
    "setting, said",
    [
        ("nativ", "there is no backend 'nativ'; did you mean cpp?"),
        ("cuda", "there is no backend 'cuda'; choose one of auto, "),
        ("scam=cpp", "there is no operator 'scam'; did you mean scan?"),
        ("scan=nativ", "there is no backend of scan 'nativ'; did you mean cpp?"),
        (
            "ssd=cpp",
            f"there is no backend of ssd 'cpp'; choose one of {', '.join(OPERATORS['ssd'])}",
        ),
        ("scan=", "there is no backend of scan ''"),
        ("scan=cpp,", "there is no operator ''"),
        ("scan=cpp,scan=reference", "give each operator one backend"),
    ],
)
def test_names_that_there_are_not_are_refused_with_the_settings(setting, said):
    """Before anything is built: with the nearest name, or all."""
    with pytest.raises(UserError, match="kernels=") as refused:
        resolve_settings({"kernels": setting})
    assert f"kernels={setting}: {said}" in str(refused.value)


def test_names_are_checked_without_torch(project):
    code = (
        "import sys; from config.resolve import resolve_settings; resolve_settings({'kernels': 'scan=cpp'}); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=project).returncode == 0


def test_a_demand_on_nothing_is_refused():
    """An operator that the model does not have, and a backend that none of its operators has."""
    mamba2, llama = ModelConfig(layers="mamba2"), ModelConfig(layers="attention")
    assert (
        "kernels=scan=cpp: this model has no scan, only conv, ssd, norm, loss, mamba2"
        in refusal("scan=cpp", config=mamba2)
    )
    assert (
        "kernels=cpp: this model has no operator of that backend, only attention, norm, loss"
        in refusal("cpp", config=llama)
    )
    assert demands("scan=cpp") == {"scan": "cpp"}


def test_a_new_form_is_a_module_and_a_name(monkeypatch):
    """A toy backend of the scan is chosen best first, asked what it takes, and called."""
    toy = types.ModuleType("mamba_fsdp.ops.scan.toy")
    toy.why_unavailable = lambda: None
    toy.takes = lambda use: "the toy keeps no documents apart" if use.seq_idx else None
    toy.selective_scan = lambda u, *rest: u * 0 + 7
    monkeypatch.setitem(sys.modules, toy.__name__, toy)
    monkeypatch.setitem(backends.BACKENDS, "toy", "cpu")
    monkeypatch.setitem(backends.OPERATORS, "scan", ("toy", *OPERATORS["scan"]))
    monkeypatch.setattr(scan, "BACKENDS", backends.modules("mamba_fsdp.ops.scan"))
    assert choose("auto").backends["scan"] == "toy" == choose("toy").backends["scan"]
    assert choose("auto", "cuda").backends["scan"] != "toy"
    bounded = choose("auto", seq_idx=True)
    assert bounded.backends[
        "scan"
    ] != "toy" and "scan not toy: the toy keeps no documents apart" in str(bounded)
    x = torch.ones(1, 3, 4)
    assert (
        scan.selective_scan(x, x, -torch.ones(4, 2), x[..., :2], x[..., :2], backend="toy") == 7
    ).all()


def test_a_form_must_take_every_use(libraries):
    """One backend serves all of a model's calls of an operator."""
    fits, other = (Use("conv", torch.bfloat16, False, channels=channels) for channels in (64, 60))
    assert resolve_backends("auto", "cuda", {"conv": [fits]}).backends == {"conv": "fused"}
    for uses in ([fits, other], [other, fits]):
        assert resolve_backends("auto", "cuda", {"conv": uses}).backends == {"conv": "reference"}
