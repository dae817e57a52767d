"""A rank of a storm's run, which may kill itself and others at a named moment; and a launcher that forks such ranks."""

import faulthandler
import gc
import os
import signal
import sys
import threading
from pathlib import Path

from tests.support.ports import hold_port, rank_environment
from tests.support.tiny import TINY, as_words

SETTINGS = {
    **TINY,
    "kernels": "auto",
    "batch_size": 1,
    "global_batch_size": 12,
    "eval_interval": 5,
    "eval_batches": 1,
    "checkpoint_interval": 1,
    "keep_checkpoints": 2,
    "deterministic": True,
}


def import_all():
    """What a rank needs, so that forked ones have it at once."""
    import torch.distributed.fsdp  # noqa: F401

    import mamba_fsdp.inference.loading  # noqa: F401
    import mamba_fsdp.interop.convert
    import mamba_fsdp.trainer.run
    import mamba_fsdp.verbs.train  # noqa: F401


def make_data(folder):
    import numpy as np

    from tests.support.corpora import write_store

    how = dict(vocab_size=64, eos=0, tokenizer="ids:of the storm")
    for name, count in (("train", 60), ("validation", 20)):
        random = np.random.default_rng(count)
        documents = [random.integers(1, 64, random.integers(5, 120)) for _ in range(count)]
        write_store(folder / "data" / name, documents, **how)


def fork(work, *arguments):
    """The process id of a child that does the work and exits with what that returns."""
    child = os.fork()
    if child:
        return child
    gc.freeze()  # what it inherits: a collection would look at it all, and so copy its pages
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
    per_node = task["ranks"]
    if task["strategy"] == "hsdp":
        per_node = 2
    os.environ.update(
        rank_environment(number, task["ranks"], port, per_node),
        TORCHELASTIC_RUN_ID="storm",
        OMP_NUM_THREADS="1",
    )
    log = os.open(f"{task['scratch']}/rank-{number}.log", os.O_WRONLY | os.O_CREAT, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    run(task)


def run(task):
    from mamba_fsdp import command_line
    from mamba_fsdp.verbs import train as training

    import_all()
    number, scratch, kill = int(os.environ["RANK"]), Path(task["scratch"]), task["kill"]
    faulthandler.register(signal.SIGUSR2, file=sys.stderr)
    (scratch / f"{os.getpid()}.pid").write_text(str(os.getppid()))
    if kill and kill["rank"] == number and not (scratch / "fired").exists():
        Death(kill, scratch, task["run"]).arrange()
    words = {
        **SETTINGS,
        "dataset_path": task["data"],
        "save_ckpt_path": task["run"],
        "num_steps": task["steps"],
        "sharding_strategy": task["strategy"],
        "async_checkpoint": task["async"],
    }
    if task["strategy"] == "context":
        words["sharding_strategy"] = "fsdp"
        words["context_parallel"] = task["ranks"]
    else:  # Gated DeltaNet can't share sequences
        words["layers"] = "mamba1,gdn+mlp"
    command_line.run(training.main, lambda: "", as_words(words))


class Death:
    """Kills whom `kill` names at its moment. That is looked for from this rank's first step on, but for files, whose
    operations count from the start."""

    def __init__(self, kill, scratch, folder):
        self.kill = kill
        self.scratch = scratch
        self.folder = folder
        self.left = kill["nth"]  # operations or steps, or seconds after the first step
        self.lock = threading.Lock()

    def arrange(self):
        from mamba_fsdp.trainer import loop

        if self.kill["at"] not in ("time", "step"):
            sys.addaudithook(self.notice)
            return
        end = loop.finish_step

        def finish_step(*given):
            if self.kill["at"] == "step":
                self.count()
            elif self.left is not None:
                threading.Timer(self.left, self.come).start()
                self.left = None
            return end(*given)

        loop.finish_step = finish_step

    def notice(self, event, arguments):
        """Counts an operation on a file of the run; "publish" means those on its models."""
        is_publish = self.kill["at"] == "publish"
        wanted = ("open", "os.rename") if is_publish else (self.kill["at"],)
        if event not in wanted or not isinstance(arguments[0], (str, bytes)):
            return
        path = os.fsdecode(arguments[0])
        if path.startswith(self.folder) and ("/pth/" in path or not is_publish):
            self.count()

    def count(self):
        with self.lock:
            self.left -= 1
            if self.left == 0:
                self.come()

    def come(self):
        (self.scratch / "fired").touch()
        whom = self.kill["whom"]
        others = living(self.scratch) if whom == "all" else []
        if whom != "rank":
            os.kill(os.getppid(), signal.SIGKILL)
        for pid in others:
            if pid != os.getpid():
                os.kill(pid, signal.SIGKILL)
        if whom != "launcher":
            os.kill(os.getpid(), signal.SIGKILL)


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
