"""The first minute on a GPU, as it goes on a CPU whose backends have to prove themselves too."""

import inspect
import json
import socket
import sys
import time
import types
from functools import partial

import pytest
import torch

import mamba_fsdp
from mamba_fsdp.errors import UserError
from mamba_fsdp.ops import conv, cpp, norm, scan, ssd
from mamba_fsdp.ops.backends import BACKENDS, OPERATORS, REFERENCE
from mamba_fsdp.ops.scan import triton as scan_triton
from mamba_fsdp.parallel.world import World
from mamba_fsdp.settings.model_config import ModelConfig
from mamba_fsdp.settings.train_config import TrainConfig
from mamba_fsdp.trainer import first_use
from mamba_fsdp.trainer.first_use import FirstUse
from mamba_fsdp.trainer.watchdog import watchdog
from tests.support.ranks import PROCESSES, run_ranks

pytestmark = [
    pytest.mark.torch22,
    pytest.mark.skipif(bool(cpp.why_unavailable()), reason="no C compiler"),
]
CPU = torch.device("cpu")
REFERENCE_OF_MAMBA1 = dict.fromkeys(("conv", "scan", "norm", "loss"), "reference")
FUNCTIONS = {
    "conv": (conv, "causal_conv_silu"),
    "scan": (scan, "selective_scan"),
    "ssd": (ssd, "ssd"),
    "norm": (norm, "gated_rms_norm"),
}


class Rescaled(torch.autograd.Function):
    """The input, with a factor on its gradient."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return ctx.factor * grad, None


def negate_gradient(x):
    return Rescaled.apply(x, -1.0)


def changed(operator, change):
    """The reference backend of an operator, but that change(function, arguments) answers."""
    package, name = FUNCTIONS[operator]
    module = package.BACKENDS["reference"]
    function = getattr(module, name)
    return types.SimpleNamespace(
        **{**vars(module), name: lambda *arguments: change(function, list(arguments))}
    )


def change_of(which, new):
    """A change: new(an argument), or new(the result) where `which` is -1."""

    def change(function, arguments):
        if which >= 0:
            arguments[which] = new(arguments[which])
        result = function(*arguments)
        return new(result) if which < 0 else result

    return change


def negate(which):
    """A change: a wrong sign of the gradient of an argument, or of the result."""
    return change_of(which, negate_gradient if which >= 0 else torch.neg)


def change_state(change):
    """A change: of the state that enters alone."""

    def answer(function, arguments):
        *inputs, state, return_last_state = arguments
        return function(*inputs, state if state is None else change(state), return_last_state)

    return answer


def fail(function, arguments):
    raise RuntimeError("out of resources: shared memory\nmore of it")


def settings_of(layers="mamba1", kernels="auto", precision="fp32", **more):
    settings = TrainConfig(ModelConfig(layers=layers, d_model=16, d_state=8, headdim=8, n_layer=2))
    settings.data.seq_length = 64
    settings.training.batch_size = 1
    settings.data.reset_at_documents = True
    settings.training.mixed_precision = precision
    settings.training.kernels = kernels
    settings.training.deterministic = more.get("deterministic", False)
    return settings


def choose(folder, world=None, **given):
    folder.mkdir(parents=True, exist_ok=True)
    return first_use.choose(settings_of(**given), world or World.alone(), folder)


def tensors_of(operator):
    """{name: place among the arguments} of what has a gradient, and of the result as -1."""
    package, name = FUNCTIONS[operator]
    names = list(inspect.signature(getattr(package.BACKENDS["reference"], name)).parameters)
    others = {"seq_idx", "initial_state", "return_last_state", "chunk_size", "eps", "group_size"}
    others.add("norm_first")
    return {name: names.index(name) for name in names if name not in others} | {"result": -1}


def measure_with(monkeypatch, use, operator, change):
    """What the proof finds of the first kind of layer where this operator's backend is changed so."""
    package, _ = FUNCTIONS[operator]
    monkeypatch.setitem(package.BACKENDS, "toy", changed(operator, change))
    return use.measure(use.layers[0], REFERENCE | {operator: "toy"})


@pytest.mark.parametrize("operator", FUNCTIONS)
def test_a_wrong_sign_is_found(monkeypatch, operator):
    """Of the result or of any gradient, well above the bound; and the reference is right in bf16."""
    layer = "mamba1" if operator == "scan" else "mamba2"
    use = FirstUse(settings_of(layer, precision="bf16"), CPU)
    right = use.measure(layer, REFERENCE)
    assert right.error < right.bound / 2
    for tensor, which in tensors_of(operator).items():
        wrong = measure_with(monkeypatch, use, operator, negate(which))
        assert wrong.error > 2 * wrong.bound, tensor


@pytest.mark.parametrize("batch, d_model, cut", [(8, 2048, False), (9, 64, True)])
def test_rows_are_cut_as_in_the_run(batch, d_model, cut):
    """The scan has other kernels for cut rows."""
    settings = settings_of()
    settings.model.d_model = d_model
    settings.training.batch_size = batch
    settings.data.seq_length = 2048
    use = FirstUse(settings, CPU)
    for rows, length in (use.shape, (use.rows, first_use.POSITIONS)):
        programs = rows * settings.model.d_inner // scan_triton.CHANNELS
        segments, _ = scan_triton.segments_of(programs, -(-length // scan_triton.CHUNK))
        assert (segments > 1) == cut


def test_many_rows_do_not_loosen_the_bounds(monkeypatch):
    """Among thousands of gradients one that bf16 gets wrong by a fifth is rare; alone it would allow half a tensor's size."""
    settings = settings_of("mamba2", precision="bf16")
    settings.model = ModelConfig(layers="mamba2", d_model=64, d_state=16, headdim=32)
    settings.training.batch_size = 8
    settings.data.reset_at_documents = False
    use = FirstUse(settings, CPU)
    enlarge = change_of(tensors_of("ssd")["A"], lambda A: Rescaled.apply(A, 1.25))
    wrong = measure_with(monkeypatch, use, "ssd", enlarge)
    assert wrong.error > wrong.bound


@pytest.mark.parametrize(
    "operator, layer", [("scan", "mamba1"), ("ssd", "mamba2"), ("ssd", "mamba3")]
)
def test_a_wrong_state_is_found_where_one_is_handed_on(monkeypatch, operator, layer):
    """To the next token, or to the next of the ranks that share sequences, of whose gradient nothing else tells."""
    settings = settings_of(layer, precision="bf16")
    alone = measure_with(monkeypatch, FirstUse(settings, CPU), operator, change_state(torch.neg))
    assert alone.error < alone.bound, "a training alone hands on no state"
    answering = FirstUse(settings, CPU)
    answering.continued = 1
    settings.parallel.context_parallel = 2
    sharing = FirstUse(settings, CPU)
    for use, change in ((answering, torch.neg), (sharing, negate_gradient)):
        right = use.measure(layer, REFERENCE)
        wrong = measure_with(monkeypatch, use, operator, change_state(change))
        assert right.error < right.bound / 2 and wrong.error > 2 * wrong.bound
        assert wrong.worst.endswith("from a state")


def test_what_is_wrong_or_raises_is_passed_over_by_name(tmp_path, monkeypatch):
    monkeypatch.setitem(conv.BACKENDS, "cpp", changed("conv", negate(1)))
    choice, origin = choose(tmp_path / "run")
    assert choice.backends == {**REFERENCE_OF_MAMBA1, "scan": "cpp"}
    assert "conv not cpp: gradient of mixer.conv1d.weight is off by 2 of its largest value" in str(
        choice
    )
    assert origin.startswith("tested and timed; correct on all 1 ranks")
    monkeypatch.setitem(scan.BACKENDS, "cpp", changed("scan", fail))
    said = r"only plain PyTorch is left for scan.*not cpp: RuntimeError: out of resources: shared memory\).*install"
    with pytest.raises(UserError, match=said):
        choose(tmp_path / "2" / "run")
    with pytest.raises(UserError, match="scan can't be cpp on cpu: RuntimeError: out of resources"):
        choose(tmp_path / "demanding", kernels="scan=cpp")
    assert choose(tmp_path / "told", kernels="scan=reference")[0].backends["scan"] == "reference"


def test_a_simpler_form_is_taken_where_the_usual_one_is_wrong(tmp_path, monkeypatch):
    """And at every further start of the run."""
    right = conv.BACKENDS["cpp"]
    toy = changed("conv", negate(1))
    wrong = toy.causal_conv_silu
    simplify = partial(setattr, toy, "causal_conv_silu", right.causal_conv_silu)
    monkeypatch.setattr(right, "use_simpler_form", simplify, raising=False)
    monkeypatch.setitem(conv.BACKENDS, "cpp", toy)
    for _ in range(2):
        toy.causal_conv_silu = wrong
        assert choose(tmp_path / "run")[0].backends["conv"] == "cpp"
        assert json.loads((tmp_path / "run" / "kernels.json").read_text())["simpler"] == ["conv"]


def test_a_backend_that_does_not_repeat_is_not_deterministic(tmp_path, monkeypatch):
    calls = []

    def vary(function, arguments):
        calls.append(None)
        return function(*arguments) * (1 + len(calls) * 2e-7)

    monkeypatch.setitem(conv.BACKENDS, "cpp", changed("conv", vary))
    assert choose(tmp_path / "run")[0].backends["conv"] == "cpp"
    choice, _ = choose(tmp_path / "repeating", deterministic=True)
    assert choice.backends == {**REFERENCE_OF_MAMBA1, "scan": "cpp"}
    assert "conv not cpp: its results do not repeat bit for bit" in str(choice)


def test_the_faster_one_is_taken_and_kept(tmp_path, monkeypatch):
    """In this run, which stays with it, and beside it for the next; another form of it is asked anew."""
    monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))
    monkeypatch.setitem(BACKENDS, "triton", "cpu")
    monkeypatch.setitem(OPERATORS, "scan", ("cpp", "triton", "reference"))
    monkeypatch.setitem(scan.BACKENDS, "triton", scan.BACKENDS["reference"])
    times = {"cpp": 2.0, "triton": 1.0}
    monkeypatch.setattr(FirstUse, "milliseconds", lambda self, chosen: times[chosen["scan"]])
    choice, origin = choose(tmp_path / "run")
    assert choice.backends["scan"] == "triton" and origin.startswith("tested and timed")
    record = json.loads((tmp_path / "run" / "kernels.json").read_text())
    assert sorted(record["milliseconds"].values()) == [1.0, 2.0] and not record["under_way"]
    times["triton"] = 3.0
    _, origin = choose(tmp_path / "run")
    assert origin.startswith("chosen when this run began; correct on all 1 ranks")
    choice, origin = choose(tmp_path / "next")
    assert choice.backends["scan"] == "triton" and origin.startswith("chosen for an earlier run (")
    choice, origin = choose(tmp_path / "run", kernels="conv=cpp")
    assert choice.backends["scan"] == "cpp" and origin.startswith("tested and timed")
    monkeypatch.setitem(sys.modules, "triton", None)
    said = "scan can't be triton: triton does not load .*kernels.json and"
    with pytest.raises(UserError, match=said):
        choose(tmp_path / "next")


def hang(folder):
    """A start of a run that hangs while a backend is tried, until the watchdog ends it."""
    conv.BACKENDS["cpp"] = changed("conv", lambda function, arguments: time.sleep(1000))
    with watchdog(0.05, 0):
        choose(folder)


def lose_device(self):
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.mark.slow
def test_what_hangs_or_ends_two_starts_is_passed_over(tmp_path, monkeypatch):
    run = tmp_path / "hanging" / "run"
    start = PROCESSES.Process(target=hang, args=(run,))
    start.start()
    start.join()
    assert start.exitcode == 1
    choice, _ = choose(run)
    assert choice.backends["conv"] == "reference"
    assert "conv not cpp: earlier starts hung or ended while it was tried" in str(choice)

    run = tmp_path / "lost" / "run"
    with monkeypatch.context() as lost:
        lost.setattr(FirstUse, "synchronize", lose_device)
        for _ in range(2):
            with pytest.raises(UserError, match="lost to this process; start again") as ended:
                choose(run)
            assert ended.value.exit_code == 1  # the launcher starts it again
    assert choose(run)[0].backends == choice.backends


def on_two_ranks(world, folder):
    """What each rank says where both have a wrong conv, where rank 1 alone gets one later, and where only its bits are
    others."""
    right = conv.BACKENDS["cpp"]
    conv.BACKENDS["cpp"] = changed("conv", negate(1))
    said = [str(choose(folder / "first", world)[0])]
    conv.BACKENDS["cpp"] = right
    choose(folder / "2" / "run", world)
    for change in (negate(1), lambda function, arguments: function(*arguments) * (1 + 3e-7)):
        if world.rank == 1:
            conv.BACKENDS["cpp"] = changed("conv", change)
        try:
            choose(folder / "2" / "run", world)
        except UserError as error:
            said.append(str(error))
    return said


def test_a_rank_that_alone_finds_it_wrong_is_named(tmp_path):
    one, other = run_ranks(2, on_two_ranks, tmp_path)
    assert one == other
    passed, wrong, others_bits = one
    here = f"the chosen kernels fail on rank 1 on {socket.gethostname()}: "
    gradient = "gradient of mixer.conv1d.weight"
    assert f"conv not cpp: {gradient}" in passed
    assert wrong.startswith(f"{here}{gradient} is off by 2 of its largest value")
    assert others_bits.startswith(f"{here}its bits differ from those of rank 0")
    assert "--exclude=NODE" in others_bits


def test_a_model_that_answers_takes_what_is_right(tmp_path, monkeypatch, train):
    """As evaluate, generate and mamba_fsdp.load have it: from token to token too."""
    train(tmp_path, num_steps=1, eval_interval=0)
    monkeypatch.setattr(first_use, "DEVICES", {"cpu"})
    backends = mamba_fsdp.load(tmp_path).network.backends
    assert backends == {**REFERENCE_OF_MAMBA1, "conv": "cpp", "scan": "cpp"}
    monkeypatch.setitem(scan.BACKENDS, "cpp", changed("scan", change_state(torch.neg)))
    backends = mamba_fsdp.load(tmp_path).network.backends
    assert backends == {**REFERENCE_OF_MAMBA1, "conv": "cpp"}


def test_a_run_says_what_it_chose(tmp_path, monkeypatch, train):
    """And resumes with it; a dry run proves nothing."""
    monkeypatch.setattr(first_use, "DEVICES", {"cpu"})
    more = {"kernels": "auto", "eval_interval": 0, "publish": "false"}
    assert "; tested and" not in train(tmp_path / "run", dry_run=True, **more)
    for steps, origin in ((1, "tested and timed"), (2, "chosen when this run began")):
        said = train(tmp_path / "run", num_steps=steps, **more)
        assert f"loss; {origin}; correct on all 1 ranks, " in said
