"""Tests mamba_fsdp.trainer.kernel_selection on a CPU, with backends that replace those of a GPU."""

import inspect
import json
import re
import socket
import sys
import time
import types
from functools import partial

import pytest
import torch

import mamba_fsdp
from mamba_fsdp.errors import TransientError, UserError
from mamba_fsdp.model.config import ModelConfig
from mamba_fsdp.ops import backends, conv, cpp, gdn, norm, scan, ssd
from mamba_fsdp.ops.backends import BACKENDS, OPERATORS, REFERENCE, demands
from mamba_fsdp.parallel.parallelize import choose_strategy
from mamba_fsdp.parallel.world import World
from mamba_fsdp.settings.train_config import TrainConfig
from mamba_fsdp.trainer import kernel_selection, layer_check
from mamba_fsdp.trainer.layer_check import READS_AFTER_STATE, LayerCheck, Rows
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
    "gdn": (gdn, "gated_delta_rule"),
}


@pytest.fixture
def few_positions(monkeypatch):
    """Shortens the inputs of the comparison, for tests that do not depend on their length."""
    monkeypatch.setattr(layer_check, "POSITIONS", 32)


class Negated(torch.autograd.Function):
    """Returns its input in the forward pass, and negates the gradient in the backward pass."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return -grad


class Clock:
    """Replaces time.perf_counter. Its time advances only while a backend of `at_pace` computes."""

    now = 0.0

    def __call__(self):
        return self.now

    def at_pace(self, seconds):
        """Returns a change, see `changed`, that returns the results of the reference and advances the clock by this
        many seconds."""

        def compute(function, arguments):
            self.now += seconds
            return function(*arguments)

        return compute


def changed(operator, change):
    """Returns a backend of an operator that calls change(function of the reference, arguments)."""
    package, name = FUNCTIONS[operator]
    module = package.BACKENDS["reference"]
    function = getattr(module, name)
    return types.SimpleNamespace(
        **{**vars(module), name: lambda *arguments: change(function, list(arguments))}
    )


def negate(which):
    """Returns a change that negates the gradient of the argument with the index `which`, or the result if `which` is
    -1."""

    def change(function, arguments):
        if which >= 0:
            arguments[which] = Negated.apply(arguments[which])
        result = function(*arguments)
        return -result if which < 0 else result

    return change


def change_state(change):
    """Returns a change that applies a function to the initial state only."""

    def answer(function, arguments):
        *inputs, state, return_last_state = arguments
        return function(*inputs, state if state is None else change(state), return_last_state)

    return answer


@pytest.fixture
def spoil(monkeypatch):
    """Returns a function spoil(operator, change, backend="cpp"), which replaces the backend by `changed(operator,
    change)`."""

    def spoil(operator, change, backend="cpp"):
        package, _ = FUNCTIONS[operator]
        monkeypatch.setitem(package.BACKENDS, backend, changed(operator, change))

    return spoil


@pytest.fixture
def measure(spoil):
    """Returns a function measure(layers, operator, change), which compares the first kind of layer with the reference
    if the operator is changed."""

    def measure(layers, operator, change):
        spoil(operator, change, "toy")
        return layers.measure(layers.kinds[0], REFERENCE | {operator: "toy"})

    return measure


def fail(function, arguments):
    raise RuntimeError("out of resources: shared memory\nmore of it")


def settings_of(layers="mamba1", **given):
    model = ModelConfig(layers=layers, d_model=16, d_state=8, headdim=8, n_layer=2)
    usual = {
        "seq_length": 64,
        "batch_size": 1,
        "mixed_precision": "fp32",
        "reset_at_documents": True,
    }
    return TrainConfig(model).with_values(**{**usual, **given})


def choose(folder, world=None, **given):
    folder.mkdir(parents=True, exist_ok=True)
    settings = settings_of(**given)
    world = world or World.alone()
    strategy = choose_strategy(settings.parallel, world)
    return kernel_selection.select_kernels(settings, world, strategy, folder)


def tensors_of(operator):
    """Returns {name of an argument with a gradient: its index}, and "result": -1."""
    package, name = FUNCTIONS[operator]
    names = list(inspect.signature(getattr(package.BACKENDS["reference"], name)).parameters)
    others = {"seq_idx", "initial_state", "return_last_state", "chunk_size", "eps", "group_size"}
    others.add("norm_first")
    return {name: names.index(name) for name in names if name not in others} | {"result": -1}


@pytest.mark.parametrize("operator", FUNCTIONS)
def test_a_wrong_sign_is_found(measure, operator):
    """If the result of an operator or any of its gradients has the wrong sign, the error is far above the tolerance.
    The error of the reference in bf16 is below the tolerance."""
    kind = {"scan": "mamba1", "gdn": "gdn"}.get(operator, "mamba2")
    layers = LayerCheck(settings_of(kind, mixed_precision="bf16"), CPU)
    assert layers.measure(kind, REFERENCE).share < 0.5
    for tensor, which in tensors_of(operator).items():
        wrong = measure(layers, operator, negate(which))
        assert wrong.share > 2, tensor


def test_triton_compiles_the_code_of_the_run_for_the_tested_rows():
    """The inputs of the comparison make Triton compile the code that the run uses: their lengths equal the length of
    the run modulo 16, and if the run has enough rows to fill a GPU, the inputs have enough, too, because the kernels
    divide each row into parts if there are fewer rows."""
    settings = settings_of(d_model=2048, batch_size=40, seq_length=100)
    assert LayerCheck(settings, CPU).tests == [Rows(9, 592 + 4), Rows(1, 100)]
    shared = LayerCheck(settings.with_values(context_parallel=3), CPU)
    assert shared.tests == [Rows(9, 592 + 2), Rows(1, 34)]
    assert shared.reads == [Rows(9, 592 + 2)]
    assert LayerCheck(settings.with_values(batch_size=2), CPU).tests[0].batch == 2


@pytest.mark.usefixtures("few_positions")
def test_the_length_of_the_run_is_not_tested_if_it_does_not_fit_in_memory(spoil):
    """If the inputs with the length of the run do not fit in memory, only shorter inputs are compared. The reference
    is in float64, and therefore needs more memory than the run."""
    layers = LayerCheck(settings_of(seq_length=100), CPU)

    def compute(function, arguments):
        if arguments[0].dtype == torch.float64 and arguments[0].shape[1] == 100:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return function(*arguments)

    spoil("scan", compute, "reference")
    assert layers.measure("mamba1", REFERENCE).share < 1
    assert layers.tests == [Rows(1, 32 + 100 % 16)]


@pytest.mark.parametrize(
    "operator, kind", [("scan", "mamba1"), ("ssd", "mamba2"), ("ssd", "mamba3"), ("gdn", "gdn")]
)
def test_a_wrong_state_is_found_if_the_model_decodes_token_by_token(measure, operator, kind):
    layers = LayerCheck(settings_of(kind, mixed_precision="bf16"), CPU)
    found = measure(layers, operator, change_state(torch.neg))
    assert found.share < 1, "a training alone hands on no state"
    layers.reads = READS_AFTER_STATE
    layers.expected.clear()
    assert layers.measure(kind, REFERENCE).share < 0.5
    wrong = measure(layers, operator, change_state(torch.neg))
    assert wrong.share > 2 and not wrong.tensor.endswith("after 0")


def test_a_wrong_gradient_of_a_state_is_found_with_context_parallelism(measure):
    """With context parallelism, a wrong gradient of the initial state is found. The inputs contain documents, and the
    first of them begins on an earlier rank."""
    settings = settings_of("mamba1", mixed_precision="bf16", context_parallel=2)
    layers = LayerCheck(settings, CPU)
    assert layers.measure("mamba1", REFERENCE).share < 0.5
    assert measure(layers, "scan", change_state(Negated.apply)).share > 2


@pytest.mark.parametrize("kind", ["mamba1", "mamba2", "mamba3", "attention"])
def test_context_parallelism_is_tested_with_a_state_of_an_earlier_rank(kind):
    """With context parallelism, the inputs begin with a state of an earlier rank. This state affects only the positions
    before the start of the first document, which is at position 32 here."""
    layers = LayerCheck(settings_of(kind, context_parallel=2), CPU)
    model = layers.make_model([kind], REFERENCE)
    rows = Rows(1, 96)
    with torch.no_grad():
        sharing, _ = layers.run(model, rows).values()
        model.enable_context_parallel(None)
        layers.context = None
        alone, _ = layers.run(model, rows).values()
    assert not torch.equal(sharing[:, :32], alone[:, :32])
    torch.testing.assert_close(sharing[:, 32:64], alone[:, 32:64])


@pytest.mark.usefixtures("few_positions")
def test_a_backend_that_is_wrong_or_fails_is_rejected_by_name(tmp_path, spoil):
    spoil("conv", negate(1))
    choice, origin = choose(tmp_path / "run")
    assert choice.backends == {**REFERENCE_OF_MAMBA1, "scan": "cpp"}
    message = r"conv not cpp: gradient of mixer.conv1d.weight over 1 x \d+ positions after 0 is off by 2 of"
    assert re.search(message, str(choice))
    assert origin.startswith(
        "tested, not timed: one correct backend per operator, or deterministic="
    )
    spoil("scan", fail)
    message = r"only plain PyTorch is left for scan.*not cpp: RuntimeError: out of resources: shared memory\).*install"
    with pytest.raises(UserError, match=message):
        choose(tmp_path / "2" / "run")
    with pytest.raises(UserError, match="scan can't be cpp on cpu: RuntimeError: out of resources"):
        choose(tmp_path / "demanding", kernels="scan=cpp")
    assert choose(tmp_path / "told", kernels="scan=reference")[0].backends["scan"] == "reference"


@pytest.mark.usefixtures("few_positions")
def test_a_simpler_form_is_used_if_the_usual_one_is_wrong(tmp_path, monkeypatch):
    """If a backend is wrong but its simpler form is correct, this start and every later start of the run use the
    simpler form."""
    right = conv.BACKENDS["cpp"]
    toy = changed("conv", negate(1))
    wrong = toy.causal_conv_silu
    simplify = partial(setattr, toy, "causal_conv_silu", right.causal_conv_silu)
    monkeypatch.setattr(right, "use_simpler_form", simplify, raising=False)
    monkeypatch.setitem(conv.BACKENDS, "cpp", toy)
    for _ in range(2):
        toy.causal_conv_silu = wrong
        assert choose(tmp_path / "run")[0].backends["conv"] == "cpp"


@pytest.mark.usefixtures("few_positions")
def test_a_simpler_form_can_be_demanded(tmp_path, monkeypatch):
    """kernels=OPERATOR=BACKEND-simpler selects the simpler form of a backend, which helps, for example, if SSD loses a
    GPU repeatedly. For operators without a simpler form, this setting is an error."""
    assert demands("ssd=triton-simpler", ["ssd"]) == {"ssd": "triton"}
    with pytest.raises(UserError, match="there is no backend of scan 'triton-simpler'"):
        demands("scan=triton-simpler", ["scan"])
    used = []
    monkeypatch.setitem(backends.SIMPLER, "conv", ("cpp-simpler",))
    monkeypatch.setattr(
        conv.BACKENDS["cpp"], "use_simpler_form", lambda: used.append(1), raising=False
    )
    for kernels, count in (("conv=cpp", 0), ("conv=cpp-simpler", 1)):
        chosen, _ = choose(tmp_path / kernels, kernels=kernels)
        assert chosen.backends["conv"] == "cpp" and bool(used) == bool(count)


@pytest.mark.usefixtures("few_positions")
def test_kernels_are_selected_again_if_the_settings_change(tmp_path, spoil):
    """A start with other settings selects kernels again. With deterministic=true, a backend whose results are not
    reproducible is rejected, and this is not reported as a fault of the GPU."""
    calls = []

    def vary(function, arguments):
        calls.append(None)
        return function(*arguments) * (1 + len(calls) * 2e-7)

    spoil("conv", vary)
    assert choose(tmp_path / "run")[0].backends["conv"] == "cpp"
    choice, _ = choose(tmp_path / "run", deterministic=True)
    assert choice.backends == {**REFERENCE_OF_MAMBA1, "scan": "cpp"}
    assert "conv not cpp: the results do not repeat bit for bit" in str(choice)
    for origin in ("tested, ", "chosen when this run began"):
        assert choose(tmp_path / "run", reset_at_documents=False)[1].startswith(origin)


ACCIDENTS = [
    torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    OSError(28, "No space left on device"),
]


@pytest.mark.usefixtures("few_positions")
@pytest.mark.parametrize("accident", ACCIDENTS, ids=str)
def test_a_transient_error_does_not_reject_a_backend(tmp_path, spoil, accident):
    """A transient error in a comparison ends the start with the exit code of a transient error, so the launcher
    restarts the ranks. The backend is not rejected, neither for this run nor for others."""

    def meet(function, arguments):
        raise accident

    spoil("conv", meet)
    for _ in range(3):
        with pytest.raises(TransientError, match=re.escape(str(accident))) as ended:
            choose(tmp_path / "run")
        assert ended.value.exit_code == 1
    assert not (tmp_path / ".cache").exists()
    spoil("conv", lambda function, arguments: function(*arguments))
    choice, origin = choose(tmp_path / "run")
    assert choice.backends["conv"] == "cpp" and origin.startswith("tested, ")
    spoil("conv", meet)
    # The backends were selected before, so the ranks only test them. The error is still transient.
    with pytest.raises(TransientError) as ended:
        choose(tmp_path / "run")
    assert ended.value.exit_code == 1 and "--exclude" not in str(ended.value)


@pytest.fixture
def rivals(monkeypatch, spoil):
    """Provides two backends for conv and for scan on a CPU, which differ only in speed.

    Returns a function that sets the seconds of a backend: rivals(operator, backend, seconds).
    """
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))
    monkeypatch.setitem(BACKENDS, "triton", "cpu")
    monkeypatch.setitem(OPERATORS, "mamba1", ("fused",))
    for operator in ("norm", "loss"):
        monkeypatch.setitem(OPERATORS, operator, ("reference",))

    def set_pace(operator, backend, seconds):
        spoil(operator, clock.at_pace(seconds), backend)

    for operator in ("conv", "scan"):
        monkeypatch.setitem(OPERATORS, operator, ("cpp", "triton", "reference"))
        set_pace(operator, "cpp", 2.0)
    set_pace("conv", "triton", 3.0)
    set_pace("scan", "triton", 1.0)
    return set_pace


@pytest.mark.usefixtures("few_positions")
def test_the_fastest_backends_are_selected_and_kept(tmp_path, spoil, rivals):
    """The fastest backend of each operator is selected, and kept for this run and for later runs. A start with
    another value of `kernels` selects again."""
    choice, origin = choose(tmp_path / "run")
    fastest = {**REFERENCE_OF_MAMBA1, "conv": "cpp", "scan": "triton"}
    assert choice.backends == fastest
    assert origin.startswith("tested, and the fastest of 3 combinations; correct on 1 rank,")
    found = json.loads((tmp_path / "run/kernels.json").read_text())["candidates"]
    assert [each["milliseconds"] for each in found] == [None, 5000.0, None, 3000.0]
    rivals("scan", "triton", 9.0)
    choice, origin = choose(tmp_path / "run")
    assert choice.backends == fastest and origin.startswith("chosen when this run began; correct")
    choice, origin = choose(tmp_path / "next")
    assert choice.backends == fastest and origin.startswith("chosen for an earlier run (")
    choice, origin = choose(tmp_path / "run", kernels="conv=cpp")
    assert choice.backends["scan"] == "cpp" and origin.startswith("tested, and")
    spoil("scan", fail, "triton")
    message = "fail on rank 0 on .*: RuntimeError: out of resources.*kernels.json and"
    with pytest.raises(UserError, match=message) as failed:
        choose(tmp_path / "next")
    assert failed.value.exit_code == 2


def hang(function, arguments):
    with watchdog(0.001, 0):
        time.sleep(1000)


def start_that_hangs(folder):
    """Starts a run that hangs while a backend is tested, until the watchdog ends the process."""
    conv.BACKENDS["cpp"] = changed("conv", hang)
    choose(folder)


def lose_device(self):
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.mark.usefixtures("few_positions")
@pytest.mark.slow
def test_a_backend_that_hangs_or_ends_two_starts_is_rejected(tmp_path, monkeypatch):
    run = tmp_path / "hanging" / "run"
    start = PROCESSES.Process(target=start_that_hangs, args=(run,))
    start.start()
    start.join()
    assert start.exitcode == 1
    choice, _ = choose(run)
    assert choice.backends["conv"] == "reference"
    assert "conv not cpp: earlier starts hung or ended while it was tested" in str(choice)

    run = tmp_path / "lost" / "run"
    with monkeypatch.context() as lost:
        lost.setattr(LayerCheck, "synchronize", lose_device)
        for _ in range(2):
            with pytest.raises(UserError, match="the GPU is lost: start again") as ended:
                choose(run)
            assert ended.value.exit_code == 1
    assert choose(run)[0].backends == choice.backends


def refusal(folder, world):
    """Returns the exit code and the error message of a selection that fails."""
    with pytest.raises(UserError) as refused:
        choose(folder, world)
    return f"{refused.value.exit_code} {refused.value}"


def on_two_ranks(world, folder):
    """Returns the errors of this rank in three selections. In the first, rank 1 has a wrong conv. In the second, the
    conv of rank 1 has slightly different bits. In the third, rank 1 loses its GPU."""
    choose(folder, world)
    errors = []
    for change in (negate(1), lambda function, arguments: function(*arguments) * (1 + 3e-7)):
        if world.rank == 1:
            conv.BACKENDS["cpp"] = changed("conv", change)
        errors.append(refusal(folder, world))
    if world.rank == 1:
        LayerCheck.synchronize = lose_device
    return [*errors, refusal(folder, world)]


@pytest.mark.slow
def test_the_only_rank_with_a_wrong_backend_is_named(tmp_path):
    one, other = run_ranks(2, on_two_ranks, tmp_path / "run")
    assert one == other
    wrong, others_bits, lost = one
    here = f"2 the chosen kernels fail on rank 1 on {socket.gethostname()}: "
    assert wrong.startswith(f"{here}gradient of mixer.conv1d.weight over 1 x ")
    assert "off by 2 of its largest" in wrong
    assert others_bits.startswith(
        f"{here}the results are not bitwise equal to the results of rank 0"
    )
    assert "--exclude=NODE" in others_bits
    assert lost.startswith("1 rank 1 on ") and "the GPU is lost: start again" in lost


def on_two_nodes(world, folder):
    """Returns the exit code and the error message of this rank if rank 1 is on another node and has a wrong conv."""
    socket.gethostname = lambda: f"node{world.rank}"
    choose(folder, world)
    if world.rank == 1:
        conv.BACKENDS["cpp"] = changed("conv", negate(1))
    return refusal(folder, world)


@pytest.mark.slow
def test_the_only_node_with_a_wrong_backend_is_at_fault_and_other_nodes_start_again(tmp_path):
    healthy, sick = run_ranks(2, on_two_nodes, tmp_path / "run")
    assert sick.startswith("75 rank 1 on node1: gradient of mixer.conv1d.weight")
    assert healthy == "1" + sick[2:]


def test_inference_uses_correct_backends(tmp_path, monkeypatch, spoil, train):
    """mamba_fsdp.load selects correct backends, like evaluate and generate. A backend that is wrong only when it
    decodes token by token is rejected."""
    train(tmp_path, num_steps=1, eval_interval=0)
    monkeypatch.setattr(kernel_selection, "TESTED_DEVICES", {"cpu"})
    backends = mamba_fsdp.load(tmp_path).network.backends
    assert backends == {**REFERENCE_OF_MAMBA1, "conv": "cpp", "scan": "cpp"}
    spoil("scan", change_state(torch.neg))
    backends = mamba_fsdp.load(tmp_path).network.backends
    assert backends == {**REFERENCE_OF_MAMBA1, "conv": "cpp"}


def test_inference_tests_only_as_many_backends_as_needed(monkeypatch, rivals):
    monkeypatch.setattr(kernel_selection, "TESTED_DEVICES", {"cpu"})
    for broken in ("scan", "conv"):
        monkeypatch.setitem(FUNCTIONS[broken][0].BACKENDS, "triton", changed(broken, fail))
    settings = TrainConfig(ModelConfig(layers="mamba1", d_model=32, dt_rank=4))
    choice = kernel_selection.select_for_inference(settings, CPU)
    assert str(choice) == "cpp: conv, scan; reference: norm, loss"
    monkeypatch.setitem(conv.BACKENDS, "cpp", changed("conv", fail))
    choice = kernel_selection.select_for_inference(settings, CPU)
    assert str(choice).startswith("reference: conv, norm, loss; cpp: scan; conv not cpp: ")
    assert "conv not triton: RuntimeError: out of resources" in str(choice)


@pytest.mark.usefixtures("few_positions")
def test_a_run_prints_its_selection(tmp_path, monkeypatch, train):
    """A run prints the selected kernels and how they were chosen, and resumes with the same kernels. A dry run does
    not test kernels."""
    monkeypatch.setattr(kernel_selection, "TESTED_DEVICES", {"cpu"})
    more = {"kernels": "auto", "eval_interval": 0, "publish": "false"}
    assert "; tested" not in train(tmp_path / "run", dry_run=True, **more)
    for steps, origin in ((1, "tested, not timed: one"), (2, "chosen when this run began")):
        printed = train(tmp_path / "run", num_steps=steps, **more)
        assert f"loss; {origin}" in printed and "; correct on 1 rank, " in printed
