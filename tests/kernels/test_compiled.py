"""Every listed kernel compiles for GPUs that are not here, without spilling, within the bounds beside it.

By default each on sm_90 with Triton 3.6 and on one other pair of architecture and Triton; KERNEL_GATES=all
tests/run.sh tests/kernels/test_compiled.py takes all pairs. Triton keeps what it compiled beside itself.
"""

import os
import sys
from dataclasses import replace
from unittest.mock import Mock

import pytest

from benchmarks.kernels import __main__ as benchmark
from benchmarks.kernels import compiler, limits
from benchmarks.kernels.compiler import compile_all, kernels_of, operators
from benchmarks.kernels.install import TRITONS, triton_folder
from benchmarks.kernels.machine_code import Loop
from benchmarks.kernels.reference import answers, sources

PAIRS = [(version, cc) for version, ccs in TRITONS.items() for cc in ccs]
SHARED = {cc: (kib - 1) * 1024 for cc, (_, _, kib) in limits.ROOM.items()}  # of one program
TOY = "tests.kernels.toy_list"


def requests(version):
    chosen = []
    for operator in operators():
        for number, kernel in enumerate(kernels_of(operator).values()):
            fit = [pair for pair in PAIRS if pair[1] in kernel.ccs]
            pairs = (
                fit
                if os.environ.get("KERNEL_GATES") == "all"
                else {("3.6.0", 90), fit[7 * number % len(fit)]}
            )
            chosen += [
                (operator, kernel.name, cc)
                for of, cc in pairs
                if of == version and cc in kernel.ccs
            ]
    return chosen


def complaints(kernel, made):
    """What a kernel's code breaks, in words."""
    if made.error:
        return [made.error]
    bounds = {
        "registers": kernel.registers,
        "stack": kernel.stack,
        "shared": min(kernel.shared, SHARED[made.cc]),
        "instructions": kernel.instructions,
    }
    found = [
        f"{what} {getattr(made, what):.6g}, bound {bound:.6g}"
        for what, bound in bounds.items()
        if getattr(made, what) > bound
    ]
    return found + [f"{made.spills} spills in loops"] * (made.spills > 0)


@pytest.mark.slow
@pytest.mark.parametrize("version", TRITONS)
def test_every_kernel_keeps_its_bounds(version):
    asked = requests(version)
    try:
        made = list(compile_all(triton_folder(version), asked))
    except OSError as why:
        pytest.skip(str(why))
    assert [(one.operator, one.name, one.cc) for one in made] == asked
    wrong = {
        f"{one.operator} {one.name} sm_{one.cc}": found
        for one in made
        if (found := complaints(kernels_of(one.operator)[one.name], one))
    }
    assert not wrong, f"Triton {version}: " + "\n".join(
        f"{name}: {'; '.join(found)}" for name, found in wrong.items()
    )


@pytest.mark.slow
@pytest.mark.parametrize("version, cc", [("2.2.0", 80), ("3.9.0", 120)])
def test_the_norm_compiles_at_its_widest(version, cc):
    """It may spill there."""
    made = list(
        compile_all(
            triton_folder(version),
            [
                ("tests.kernels.widest_norm", name, cc)
                for name in kernels_of("tests.kernels.widest_norm")
            ],
        )
    )
    assert [one.error for one in made] == [""] * 4 and all(one.instructions < 100 for one in made)


@pytest.mark.slow
def test_what_breaks_its_bounds_is_said():
    """The toy with too many values for the registers, and one that is not there."""
    whole, spilling = compile_all(
        triton_folder("3.6.0"), [(TOY, "whole", 90), (TOY, "spilling", 90)]
    )
    kernel = kernels_of(TOY)["whole"]
    assert complaints(kernel, whole) == [] and 3 < whole.instructions < 6
    assert complaints(replace(kernel, registers=16, instructions=3), whole) == [
        f"registers {whole.registers}, bound 16",
        f"instructions {whole.instructions:.6g}, bound 3",
    ]
    assert "stack" in str(complaints(kernel, spilling)) and "spills in loops" in str(
        complaints(kernel, spilling)
    )
    (broken,) = compile_all(triton_folder("3.6.0"), [(TOY, "absent", 90)])
    assert complaints(kernel, broken) == ["KeyError: 'absent'"]


def test_a_loop_that_ptxas_unrolled_counts_as_written():
    kernel = replace(kernels_of(TOY)["whole"], mark=("LDG", 2), elements=64, trips=4)
    unrolled = Loop(0, 80, {"float": 70}, {"LDG.E": 8})
    left_over = Loop(0, 24, {}, {"LDG.E.U16": 2})
    around = Loop(1, 32)
    assert compiler.count(kernel, [unrolled, left_over, around]) == 80 * 32 / (64 * 4) + 32 * 32 / (
        64 * 4
    )
    assert compiler.count(kernel, [unrolled], "float") == 70 * 32 / (64 * 4)
    assert compiler.count(replace(kernel, mark=None), [unrolled, left_over]) == 104 * 32 / 64


def test_occupancy_and_floors():
    assert limits.occupancy(90, 64, 1, 0) == (32, 64) and limits.occupancy(90, 168, 4, 0) == (
        12,
        64,
    )
    assert limits.occupancy(90, 32, 4, 50_000) == (16, 64)
    made = compiler.Compiled("", "", 90, "", 64, 0, 0, 17.4, 1, [])
    scan = replace(kernels_of(TOY)["whole"], bytes_per_token=1, per_token=4096 * 16)
    assert 16_384 * limits.floor(limits.GPUS["H200"], scan, made) == pytest.approx(0.56e6, rel=0.01)
    assert limits.floor(
        limits.GPUS["H200"], replace(scan, bytes_per_token=480_000), made
    ) == pytest.approx(100)


@pytest.mark.slow
def test_the_reference_kernels_have_sane_numbers():
    """mamba-ssm's Triton kernels: all that a layer launches, with the bytes and registers that kernels can have."""
    try:
        sources()
        folder = triton_folder("3.6.0")
    except OSError as why:
        pytest.skip(str(why))
    shown = list(answers("reference_triton", folder, [90]))
    assert [made.error for made, _ in shown] == [""] * 23
    for made, _ in shown:
        assert (
            16 < made.registers <= 255
            and 0.1 < made.instructions < 200
            and made.special < made.instructions / 4
        )
    moved = [kernel.bytes_per_token / 1024 for _, kernel in shown]
    assert sum(moved[:5]) == pytest.approx(
        67, rel=0.02
    )  # SSD's forward pass; see benchmarks/kernels/ssd.py
    assert [kernel.name for _, kernel in shown[-4:]] == [
        "norm, gate",
        "norm, gate, back",
        "norm, sum",
        "norm, sum, back",
    ]
    assert moved[-4:] == pytest.approx(
        [30, 50, 24, 32], rel=0.01
    )  # 6, 10, 12 and 16 bytes of a (token, channel)


@pytest.mark.slow
def test_the_table_has_a_row_for_each_kernel_and_the_reasons_for_none(monkeypatch, capsys):
    def table(*words):
        monkeypatch.setattr(sys, "argv", ["kernels", *words])
        return benchmark.main()

    row = compiler.Compiled("mamba-ssm", "passing", 90, "3.6.0", 25, 0, 0, 5.5, 0.1, [])
    monkeypatch.setattr(benchmark, "reference", lambda *_: iter([(row, kernels_of(TOY)["whole"])]))
    assert table("--operators", TOY, "--cc", "80,90", "--loops", "--reference") == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum("toy_list whole" in line for line in lines) == 2 and "loop at depth 0: " in lines[2]
    assert "mamba-ssm passing" in lines[-1]
    monkeypatch.setattr(
        benchmark, "triton_folder", Mock(side_effect=OSError("triton-3.6.0 can't be had"))
    )
    assert table() == 2 and capsys.readouterr().err == "error: triton-3.6.0 can't be had\n"
    for words, said in (
        (["--operators", "scam"], "no kernels are listed for scam"),
        (["--cc", "100", "--triton", "2.2.0"], "Triton 2.2.0 compiles for (80, 86, 89, 90)"),
    ):
        with pytest.raises(SystemExit):
            table(*words)
        assert said in capsys.readouterr().err
