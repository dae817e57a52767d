"""Where a step's time goes, by a trace of a GPU that is made up and by one of this CPU; what is said of too little
memory."""

import json
import re

import pytest
import torch

from mamba_fsdp.train.profiling import DATA, summary


def event(category, name, start, end, thread=1):
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "ts": start,
        "dur": end - start,
        "tid": thread,
    }


def said(events):
    head, *top = summary(events)
    return (
        {name: int(share) for name, share in re.findall(r"([a-z][a-z ]*?) (\d+)%", head)},
        head,
        top,
    )


def test_a_gpu_computes_talks_waits():
    """Two steps of 100 us: kernels 0 to 60 and, on another stream, 50 to 70; NCCL 40 to 80, so that 10 are exposed;
    the host waits for data from 75 to 95 of which 5 pass under NCCL; operators of the host do not count."""
    events = [{"ph": "M", "name": "process_name"}]
    for step in (1000, 1100):
        events += [
            event("user_annotation", f"ProfilerStep#{step}", step, step + 100),
            event("cpu_op", "aten::mm", step, step + 99),
            event("user_annotation", DATA, step + 75, step + 95),
            event("kernel", "gemm", step, step + 60, 7),
            event("kernel", "norm", step + 50, step + 70, 8),
            event("kernel", "ncclDevKernel_AllGather", step + 40, step + 80, 9),
        ]
    shares, head, top = said(events)
    assert shares == {"compute": 70, "exposed communication": 10, "data": 15, "host": 5}
    assert head.startswith("profile    2 steps of 0.000 s: compute 70%, ")
    assert [line.split()[-1] for line in top] == ["gemm", "ncclDevKernel_AllGather", "norm"]
    assert top[0].split()[:6] == ["0.0001", "s", "a", "step,", "1", "x"]


def test_a_cpus_operators_count_once_and_what_waits_for_others_is_no_computing():
    shares, _, top = said(
        [
            event("user_annotation", "ProfilerStep#4", 0, 100),
            event("cpu_op", "linear", 0, 50),
            event("cpu_op", "mm", 10, 50),
            event("cpu_op", "hook", 50, 90),
            event("cpu_op", "c10d::allreduce_", 60, 90),
            event("cpu_op", "mm", 70, 80, thread=2),
        ]
    )
    assert shares == {"compute": 60, "exposed communication": 20, "data": 0, "host": 20}
    assert [line.split()[-1] for line in top] == ["mm", "c10d::allreduce_", "linear", "hook"]
    assert list(summary([event("cpu_op", "mm", 0, 1)])) == []


@pytest.mark.slow
def test_a_run_says_where_its_time_goes(train, tmp_path):
    printed = train(tmp_path / "run", use_profiler=True, num_steps=8, eval_interval=0)
    shares = re.search(
        r"^profile    3 steps of [\d.]+ s: compute (\d+)%, exposed communication 0%, data (\d+)%, "
        r"host (\d+)%\n +[\d.]+ s a step, ",
        printed,
        re.M,
    )
    assert shares and abs(sum(map(int, shares.groups())) - 100) <= 2
    events = json.loads((tmp_path / "run/profile/rank_0.json").read_text())["traceEvents"]
    assert sum(each["name"] == DATA for each in events) == 3


@pytest.mark.slow
def test_too_little_memory_on_a_gpu_leaves_a_snapshot_and_says_what_fits(
    train, tmp_path, change_loss, monkeypatch
):
    def fail(state, true_loss):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB")

    change_loss(fail)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (0, 600 * 10**6))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(
        torch.cuda.memory, "_dump_snapshot", lambda path: open(path, "w").write("snapshot")
    )
    with pytest.raises(Exception, match="rank 0 has too little memory") as caught:
        train(tmp_path / "run", batch_size=16384, eval_interval=0)
    assert re.search(
        r"most are the activations, [\d.]+ MB of [\d.]+ GB expected; plan takes batch_size=256, sel",
        str(caught.value),
    ), caught.value
    assert (tmp_path / "run/profile/memory_rank_0.pickle").read_text() == "snapshot"
