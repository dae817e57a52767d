"""A rank of a storm's run, which may kill itself and others at a named moment; and a launcher that forks such ranks."""

import faulthandler
import hashlib
import json
import os
import signal
import sys
import threading
from pathlib import Path

from tests.support.ports import hold_port

SETTINGS = {
    "d_model": 16,
    "n_layer": 2,
    "vocab_size": 64,
    "d_state": 4,
    "seq_length": 32,
    "batch_size": 1,
    "global_batch_size": 12,
    "mixed_precision": "fp32",
    "learning_rate": 0.01,
    "eval_interval": 8,
    "eval_batches": 1,
    "report_interval": 1,
    "checkpoint_interval": 1,
    "keep_checkpoints": 2,
    "deterministic": True,
}


def import_all():
    """What a rank needs, so that forked ones have it at once."""
    import torch.distributed.fsdp  # noqa: F401

    import mamba_fsdp.interop.convert
    import mamba_fsdp.train.run
    import mamba_fsdp.verbs.loading  # noqa: F401
    import training  # noqa: F401


def make_data(folder):
    import numpy as np

    from mamba_fsdp.data.store import StoreWriter

    for name, documents in (("train", 60), ("validation", 20)):
        random = np.random.default_rng(documents)
        writer = StoreWriter(
            folder / "data" / name, vocab_size=64, eos=0, tokenizer="ids:of the storm"
        )
        for _ in range(documents):
            writer.append([*random.integers(1, 64, random.integers(5, 120)).tolist(), writer.eos])
        writer.finish()


def fork(work, *arguments):
    """The process id of a child that does the work and exits with what that returns."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        code = work(*arguments) or 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def launch(task):
    """As torchrun: starts the ranks, and when one fails asks the others to stop. Returns the first one's code."""
    os.setsid()
    port = hold_port()
    ranks = [fork(be_rank, task, number, port.getsockname()[1]) for number in range(task["ranks"])]
    first = 0
    while ranks:
        ended, status = os.wait()
        ranks.remove(ended)
        first = first or os.waitstatus_to_exitcode(status)
        if first:
            for other in ranks:
                os.kill(other, signal.SIGTERM)
    return abs(first)


def be_rank(task, number, port):
    os.environ.update(
        RANK=str(number),
        WORLD_SIZE=str(task["ranks"]),
        LOCAL_RANK=str(number),
        LOCAL_WORLD_SIZE=str(task["ranks"]),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="storm",
        OMP_NUM_THREADS="1",
    )
    log = os.open(f"{task['scratch']}/rank-{number}.log", os.O_WRONLY | os.O_CREAT, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    run(task)


def run(task):
    import training
    from mamba_fsdp import command_line

    import_all()
    number, scratch, kill = int(os.environ["RANK"]), Path(task["scratch"]), task["kill"]
    faulthandler.register(signal.SIGUSR2, file=sys.stderr)
    (scratch / f"{os.getpid()}.pid").write_text(str(os.getppid()))
    trace_steps(open(scratch / f"rank-{number}-{os.getpid()}.trace", "w", buffering=1))
    if kill and kill["rank"] == number and not (scratch / "fired").exists():
        die_at(kill, scratch, task["run"])
    words = {
        **SETTINGS,
        "dataset_path": task["data"],
        "save_ckpt_path": task["run"],
        "num_steps": task["steps"],
        "sharding_strategy": task["strategy"],
        "async_checkpoint": task["async"],
    }
    if task["strategy"] == "hsdp":
        halve_the_node()
    command_line.run(
        training.main, lambda: "", [f"--{key}={value}" for key, value in words.items()]
    )


def halve_the_node():
    """Let hsdp shard over two ranks of this machine and replicate over two such pairs."""
    from mamba_fsdp.train import setup

    parallelize = setup.parallelize
    setup.parallelize = lambda *given, **more: parallelize(*given, **more, shard_size=2)


def trace_steps(trace):
    """A line after each step: its number, loss and gradient norm, and hashes of this rank's weights and moments."""
    from mamba_fsdp.train import loop

    update, end = loop.update_weights, loop.finish_step

    def update_and_hash(parallel, optimizer, loss, gradient_norm, factor, **rest):
        applied = update(parallel, optimizer, loss, gradient_norm, factor, **rest)
        weights, moments = hashlib.blake2b(digest_size=6), hashlib.blake2b(digest_size=6)
        for shard in parallel.shards(optimizer):
            (moments if shard.name.startswith("optimizer/") else weights).update(
                shard.data.numpy().tobytes()
            )
        facts.append(
            f"loss {float(loss).hex()} norm {float(gradient_norm).hex()} weights {weights.hexdigest()} "
            f"moments {moments.hexdigest()}"
        )
        return applied

    def end_and_note(context, *rest):
        stats = end(context, *rest)
        trace.write(f"{context.state.step}.{context.world.rank} {facts.pop(0)}\n")
        return stats

    facts = []
    loop.update_weights, loop.finish_step = update_and_hash, end_and_note


def die_at(kill, scratch, folder):
    """Arranges the death. A moment is looked for from this rank's first step on, but for files, whose operations count
    from the start."""
    from mamba_fsdp.train import loop

    end, left, lock = loop.finish_step, [kill["nth"]], threading.Lock()

    def now():
        (scratch / "fired").touch()
        others = living(scratch) if kill["whom"] == "all" else []
        if kill["whom"] != "rank":
            os.kill(os.getppid(), signal.SIGKILL)
        for pid in others:
            if pid != os.getpid():
                os.kill(pid, signal.SIGKILL)
        if kill["whom"] != "launcher":
            os.kill(os.getpid(), signal.SIGKILL)

    def count():
        with lock:
            left[0] -= 1
            if left[0] == 0:
                now()

    def ended(*given):
        if kill["at"] == "time" and left[0] is not None:
            threading.Timer(left[0], now).start()
            left[0] = None
        if kill["at"] == "step":
            count()
        return end(*given)

    def noticed(event, arguments):
        if event == kill["at"] or kill["at"] == "publish" and event in ("open", "os.rename"):
            path = arguments[0]
            if isinstance(path, (str, bytes)) and os.fsdecode(path).startswith(folder):
                if kill["at"] != "publish" or "/pth/" in os.fsdecode(path):
                    count()

    loop.finish_step = ended
    if kill["at"] not in ("time", "step"):
        sys.addaudithook(noticed)


def living(scratch):
    """Process ids of ranks that have not ended."""
    found = []
    for file in scratch.glob("*.pid"):
        try:
            state = Path(f"/proc/{file.stem}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state not in "ZX":
            found.append(int(file.stem))
    return found


if __name__ == "__main__":
    run(json.loads(sys.argv[1]))
