"""Runs one rank that uses Triton's cache like Triton's compiler. Tests run it: python triton_rank.py PLAN (JSON, see
main)."""

import hashlib
import json
import os
import random
import signal
import sys
import time

STAGES = ("ttir", "ttgir", "llir", "ptx", "cubin")


def contents(kernel, stage, author, size):
    """Returns text or bytes that identify their author, and that show whether they are complete."""
    body = f"{kernel}.{stage} by {author}\n".encode() * (size // 16 + 1)
    data = body + hashlib.sha256(body).hexdigest().encode()
    return data if stage in ("cubin", "so") else data.decode()


def author_of(path):
    """Returns the author of the file. Raises AssertionError if the file is incomplete."""
    with open(path, "rb") as file:
        data = file.read()
    assert hashlib.sha256(data[:-64]).hexdigest().encode() == data[-64:], (
        f"torn: {path} ({len(data)} bytes)"
    )
    return data.split(b"\n", 1)[0].split(b" by ")[1].decode()


def compile_kernel(cache, kernel, author, size):
    """Uses the cache in the same order as Triton's compile() and its launcher. If the kernel is not in the cache, this
    function writes its thirteen files. Asserts that all files that it reads are complete. Returns "hit" if the kernel
    was in the cache, otherwise "compiled"."""
    key = hashlib.sha256(kernel.encode()).hexdigest()
    manager, dump = cache.get_cache_manager(key), cache.get_dump_manager(key)
    group = manager.get_group(f"{kernel}.json") or {}
    hit = f"{kernel}.json" in group
    if not hit:
        for stage in STAGES:
            data = contents(kernel, stage, author, size)
            group[f"{kernel}.{stage}"] = manager.put(data, f"{kernel}.{stage}")
            dump.put(data, f"{kernel}.{stage}")
    launcher = cache.get_cache_manager(key[::-1])
    library = launcher.get_file(f"{kernel}.so") or launcher.put(
        contents(kernel, "so", author, size), f"{kernel}.so", binary=True
    )
    if not hit:
        group[f"{kernel}.json"] = manager.put(
            contents(kernel, "json", author, size), f"{kernel}.json", binary=False
        )
        manager.put_group(f"{kernel}.json", group)
    authors = {author_of(path) for path in group.values()}
    assert len(group) == len(STAGES) + 1 and len(authors) == 1, group
    assert hit or authors == {author}, "a file put by this rank is someone else's"
    author_of(library)
    return "hit" if hit else "compiled"


def die_at(count):
    """Makes this process kill itself during its write number `count`, counted from 1. At this moment the temporary file
    exists, and the final file does not."""
    replace = os.replace

    def counted(*paths):
        nonlocal count
        count -= 1
        if count == 0:
            os.kill(own_pid, signal.SIGKILL)
        replace(*paths)

    os.replace = counted


def meet(folder, plan):
    """Waits until plan["ranks"] processes have called this function with this folder."""
    open(os.path.join(folder, plan["author"]), "w").close()
    while len(os.listdir(folder)) < plan["ranks"]:
        time.sleep(0.001)


def main(plan):
    """Runs the rank. plan: an object with the fields kernels and author, and optionally `size` (bytes of a cache
    entry), `pid` and `seed` (which replace those of the process), `die_at` (see die_at), and `gate` (a folder in which
    this rank waits until as many ranks as the field `ranks` says have come)."""
    import triton.runtime.cache as cache  # imported here, so that tests can import this file without Triton

    if "pid" in plan:
        os.getpid = lambda: plan["pid"]
    random.seed(plan.get("seed"))
    if "die_at" in plan:
        die_at(plan["die_at"])
    if "gate" in plan:
        meet(plan["gate"], plan)
    results = {
        kernel: compile_kernel(cache, kernel, plan["author"], plan.get("size", 1000))
        for kernel in plan["kernels"]
    }
    print(json.dumps(results))


own_pid = os.getpid()
if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
