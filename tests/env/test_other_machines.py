"""On a machine that is not as ours every command runs, or ends with one line that says what to do."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.torch22]

TRAIN = (
    "PROJECT/training.py --use_dummy_dataset=true --vocab_size=64 --d_model=16 --d_state=8 --n_layer=1 --seq_length=32 "
    "--batch_size=1 --num_steps=1 --save_ckpt_path=run"
)
TOKENIZE = "PROJECT/get_dataset.py täxt.txt tokens --tokenizer=train:300 --validation_fraction=0.2"
INSPECT = "-m mamba_fsdp inspect täxt.txt"
IN_SHELL = ["bash", "-c"]
IN_MOUNTS = ["unshare", "--mount", "bash", "-c"]
WITHOUT_NAME = ["unshare", "--user", "--map-user=4321", "--map-group=4321"]
ANY = '; exec "$@"'
READ_ONLY = "mount -t tmpfs -o ro none"
NO_SHM = f"{READ_ONLY} /dev/shm"
NO_TMP = f"mkdir -p ro; for d in /tmp /var/tmp ro; do [ ! -d $d ] || {READ_ONLY} $d; done; cd ro"

# {machine: (the words that make it, what is set, the command, what a refusal says)}
MACHINES = {
    "a user without a name or a home": (WITHOUT_NAME, {"HOME": None}, TRAIN, ""),
    "a home that is a file": ([], {"HOME": "/etc/passwd"}, TRAIN, ""),
    "a temporary folder that is missing": ([], {"TMPDIR": "/proc/none"}, TRAIN, ""),
    "another Python's packages": ([], {"PYTHONPATH": "FOLDERS/broken"}, TRAIN, ""),
    "another Python's packages, a verb": ([], {"PYTHONPATH": "FOLDERS/broken"}, INSPECT, ""),
    "another Python's modules": ([], {"PYTHONHOME": "FOLDERS/home"}, INSPECT, "unset PYTHONHOME"),
    "no temporary folder, a verb": ([*IN_MOUNTS, NO_TMP + ANY, ""], {}, INSPECT, "set TMPDIR"),
    "no shared memory": ([*IN_MOUNTS, NO_SHM + ANY, ""], {}, TRAIN, ""),
    "the C locale": ([], {"LC_ALL": "POSIX", "PYTHONUTF8": "0"}, TOKENIZE, ""),
    "few open files": ([*IN_SHELL, "ulimit -n 40" + ANY, ""], {}, TOKENIZE, ""),
    "files that nobody may read": ([*IN_SHELL, "umask 777" + ANY, ""], {}, TOKENIZE, ""),
    "a proxy that is away": ([], {"https_proxy": "http://127.0.0.1:1"}, TOKENIZE, ""),
    "caches that can't be written": ([], {"HF_HOME": "/etc/passwd"}, TOKENIZE, ""),
    "no programs": ([], {"PATH": "/nowhere"}, TRAIN, ""),
}


@pytest.fixture
def folders(tmp_path):
    """Folders of another Python: `broken` has packages that can't be imported, `home` no compiled modules."""
    broken = tmp_path / "broken"
    for package in ("numpy", "yaml"):
        (broken / package).mkdir(parents=True)
        (broken / package / "__init__.py").write_text("raise ImportError('of another Python')")
    stdlib = Path(sysconfig.get_path("stdlib"))
    home = tmp_path / "home/lib" / stdlib.name
    home.mkdir(parents=True)
    for path in stdlib.iterdir():
        if path.name != "lib-dynload":
            (home / path.name).symlink_to(path)
    return tmp_path


@pytest.mark.parametrize("machine", MACHINES)
def test_a_command_runs_or_says_in_a_line_what_to_do(project, tmp_path, folders, machine):
    words, given, command, refusal = MACHINES[machine]
    probe = [*words, sys.executable, "-c", ""]
    if words and subprocess.run(probe, capture_output=True, cwd=tmp_path).returncode:
        pytest.skip("this user may not make such a machine")
    (tmp_path / "täxt.txt").write_text("Once there were words, and they were told again. " * 200)
    environment = {**os.environ, **given}
    environment["PYTHONPATH"] = f"{given.get('PYTHONPATH', '')}:{project}"
    environment = {
        name: text.replace("FOLDERS", str(folders))
        for name, text in environment.items()
        if text is not None
    }
    program = command.replace("PROJECT", str(project)).split()
    done = subprocess.run(
        [*words, sys.executable, *program],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert "Traceback" not in done.stdout + done.stderr, done.stderr
    assert done.returncode == (2 if refusal else 0), done.stderr
    if refusal:
        assert done.stderr.startswith("error: ") and refusal in done.stderr
        assert len(done.stderr.splitlines()) == 1
