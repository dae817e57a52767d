"""Gives the benchmarks of whole training steps what they share: the step, its time in turn, the memory of a process."""

import statistics
import time

import torch


def training_step(model, loss_of, tokens):
    """Returns a function that takes one step (forward, loss, backward, AdamW) on `tokens` and returns the loss before
    it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step():
        loss = loss_of(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def time_in_turn(steps, rounds):
    """Returns {name: median (seconds, CPU seconds) of a call}, from one call of each per round."""
    taken = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            began, cpu_began = time.perf_counter(), time.process_time()
            step()
            taken[name].append((time.perf_counter() - began, time.process_time() - cpu_began))
    return {
        name: tuple(statistics.median(times) for times in zip(*pairs))
        for name, pairs in taken.items()
    }


def print_memory(step, count=3):
    """Prints what this process holds before the first step, and its peak over `count` steps, in MB."""
    before = status_megabytes("VmRSS")
    for _ in range(count):
        step()
    print(before, status_megabytes("VmHWM"))


def status_megabytes(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field + ":")) // 1024
