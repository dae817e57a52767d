"""Makes temporary copies of the checkout for tests of the launcher, with or without the real training program."""

import hashlib
import json
import os
import shutil
import sys
import sysconfig
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
PARTS = [
    "1.train.sbatch",
    "2.tokenize.sbatch",
    "training.py",
    "get_dataset.py",
    "mamba_fsdp",
    "config",
    "requirements",
    "pyproject.toml",
]
# The stack of the environment in which the tests run; tests/run.sh sets it.
STACK = os.environ.get("MAMBA_FSDP_TEST_STACK", "cpu")

# A training program that only counts steps. The following environment variables and files control its end. With
# FAKE=storage, the last rank fails with a storage error. With FAKE=deaf, no rank ends. With FAKE=held, the first start
# waits at step 10 for a request to stop. A file `fail` in the run folder makes rank 0 fail. FAKE_COMMIT_SECONDS is the
# duration of a save.
FAKE_TRAINING = r"""
import json, os, resource, signal, sys, time
from pathlib import Path

settings = dict(word[2:].split("=", 1) for word in sys.argv[1:])
if "resolved" in settings:
    content = json.loads(Path(settings["resolved"]).read_text())
    values = {name: value for section in content["settings"].values() for name, value in section.items()}
    settings = {name: values[name] for name in content["explicit"]}
run, steps = Path(settings["save_ckpt_path"]), int(settings.get("num_steps", 5))
rank, fake = int(os.environ["RANK"]), os.environ.get("FAKE", "")
def mark(file):  # the same as names.stop_file_id
    return f"{file.stat().st_ino}-{file.stat().st_mtime_ns}" if file.exists() else ""
def stops():  # files that ask this start to stop
    files = [run / "STOP", Path(os.environ["MAMBA_FSDP_START"], "STOP")]
    return [file for file in files if mark(file) not in ("", os.environ["MAMBA_FSDP_OLD_STOP"])]
asked = []
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, lambda number, _: asked.append(signal.Signals(number).name))
signal.pthread_sigmask(signal.SIG_SETMASK, ())  # like a rank, because its launcher blocks the signals

def first_rank_writes(name, text):
    if rank == 0:
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(text)

def status(word, step):
    reason = "".join(stop.read_text().strip() or "STOP file" for stop in stops() if word == "stopped")
    reason = reason or "".join(asked[:1])
    first_rank_writes("status.json", json.dumps({"status": word, "step": step, "reason": reason}, indent=1))

def fail(code):
    file = os.environ["TORCHELASTIC_ERROR_FILE"]
    said = "Traceback: the cause" if code == 1 else f"error: the cause on rank {rank}"
    stack = {"py_callstack": said, "timestamp": str(int(time.time()))}
    Path(file).write_text(json.dumps({"message": {"message": "Error: the cause", "extraInfo": stack}}))
    sys.exit(code)

saved = sorted(run.glob("checkpoints/step_*/COMMIT"))
step = int(saved[-1].parent.name[5:]) if saved else 0
run.mkdir(parents=True, exist_ok=True)
line = json.dumps({"rank": rank, "step": step, "settings": settings, "environment": dict(os.environ),
                   "cwd": os.getcwd(), "open_files": resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE)}) + "\n"
with open(run / "starts.jsonl", "ab", buffering=0) as file:  # written with one call, because other ranks write to the file too
    file.write(line.encode())
# Written with one call, because the ranks of a node share a pipe, and lines must not be mixed.
sys.stdout.write(f"fake rank {rank} of {os.environ['WORLD_SIZE']} at step {step}\n")
sys.stdout.flush()
status("running", step)
if fake == "storage" and rank == int(os.environ["WORLD_SIZE"]) - 1:
    while (run / "starts.jsonl").read_text().count("\n") <= rank:  # until the other ranks have started
        time.sleep(0.05)
    fail(74)
def commit():
    if fake != "storage":
        time.sleep(float(os.environ.get("FAKE_COMMIT_SECONDS", 0)))
        first_rank_writes(f"checkpoints/step_{step:08d}/COMMIT", "{}")

while step < steps:
    time.sleep(0.1)
    step += not (fake == "held" and not saved and step == 10)
    if step == 5:
        commit()
    if rank == 0 and (run / "fail").exists():
        fail(1)
    if asked or stops():  # at the end of a step, like the real program
        break
while fake == "deaf":
    time.sleep(1)
commit()
status("finished" if step == steps else "stopped", step)
"""


# This program replaces get_dataset.py. It makes a tiny store and records its arguments.
FAKE_GET_DATASET = """
import sys
from pathlib import Path
from mamba_fsdp.data.store import StoreWriter

out = Path(sys.argv[2])
writer = StoreWriter(out / "train", vocab_size=64, eos=0, tokenizer="none")
writer.append([*range(1, 60), 0] * 9)
writer.finish()
(out / "asked").write_text(" ".join(sys.argv[1:]))
"""

MANY_STEPS = "--num_steps=1000000"  # more steps than any machine can take during a test


def make_project(folder, training=FAKE_TRAINING):
    """Makes a project folder with the launcher and library of the checkout.

    training: the text of training.py, or None for the real one. With another text, get_dataset.py
    is also replaced.
    """
    folder.mkdir(parents=True)
    half_written = shutil.ignore_patterns("*.pyc.*")  # complete bytecode remains valid in a copy
    for name in PARTS:
        if (PROJECT / name).is_dir():
            shutil.copytree(PROJECT / name, folder / name, ignore=half_written)
        else:
            shutil.copy(PROJECT / name, folder / name)
    (folder / "logs").mkdir()
    if training:
        (folder / "training.py").write_text(training)
        (folder / "get_dataset.py").write_text(FAKE_GET_DATASET)
    return folder


def make_venv(project):
    """Makes a .venv with the packages of the tests' own environment, and the stamp file of 0.create_env.sh."""
    venv = project / ".venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin/python").symlink_to(os.path.realpath(sys.executable))
    (venv / "pyvenv.cfg").write_text(f"home = {Path(os.path.realpath(sys.executable)).parent}\n")
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(venv), "platbase": str(venv)}))
    packages.mkdir(parents=True)
    (packages / "tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    digest = hashlib.sha256((project / "requirements" / f"{STACK}.txt").read_bytes()).hexdigest()
    (venv / ".complete").write_text(f"{STACK}\n{digest}\n")
    return venv


def starts(run):
    """Returns the records of the fake training program: one for each rank and start, in order."""
    file = run / "starts.jsonl"
    return [json.loads(line) for line in file.read_text().split("\n")[:-1]] if file.exists() else []


def edit(file, old, new):
    """Replaces a text that occurs once in a file of a copied project."""
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))


def shorten_corpus(folder):
    """Makes the built-in data of a copied project smaller, because Python's whole library takes
    half a minute.
    """
    every = 'sorted(root.rglob("*.py"), key=Path.as_posix)'
    edit(folder / "mamba_fsdp/importing/inputs.py", every, f"{every}[:250]")


def shorten_lease_expiry(project):
    """Lets a new start wait only seconds for the lease of a killed one, instead of half a minute."""
    lease = project / "mamba_fsdp/run/lease.py"
    edit(lease, "RENEWAL_SECONDS = 5.0", "RENEWAL_SECONDS = 0.2")
    edit(lease, "EXPIRY_SECONDS = 30.0", "EXPIRY_SECONDS = 8.0")
