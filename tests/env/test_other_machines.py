"""Tests commands on machines with unusual settings: a command works, or ends with one line that explains what to
do."""

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
NOBODY = "unshare --user --map-user=4321 --map-group=4321 env -u HOME"
READ_ONLY = "mount -t tmpfs -o ro none"
NO_TMP = f"mkdir -p ro; for d in /tmp /var/tmp ro; do [ ! -d $d ] || {READ_ONLY} $d; done; cd ro"

# {machine: (shell code before the command, the command, a part of the error message)}
MACHINES = {
    "a user without a name or a home": (NOBODY, TRAIN, ""),
    "a home that is a file": ("HOME=/etc/passwd", TRAIN, ""),
    "a temporary folder that is missing": ("TMPDIR=/proc/none", TRAIN, ""),
    "another Python's packages": ("PYTHONPATH=FOLDERS/broken:$PYTHONPATH", TRAIN, ""),
    "another Python's packages, a verb": ("PYTHONPATH=FOLDERS/broken:$PYTHONPATH", INSPECT, ""),
    "another Python's modules": ("PYTHONHOME=FOLDERS/home", INSPECT, "unset PYTHONHOME"),
    "no temporary folder, a verb": (f"{NO_TMP};", INSPECT, "set TMPDIR"),
    "no shared memory": (f"{READ_ONLY} /dev/shm;", TRAIN, ""),
    "the C locale": ("LC_ALL=POSIX PYTHONUTF8=0", TOKENIZE, ""),
    "few open files": ("ulimit -n 40;", TOKENIZE, ""),
    "files that nobody may read": ("umask 777;", TOKENIZE, ""),
    "a proxy that is away": ("https_proxy=http://127.0.0.1:1", TOKENIZE, ""),
    "caches that can't be written": ("HF_HOME=/etc/passwd", TOKENIZE, ""),
    "no programs": ("PATH=/nowhere", TRAIN, ""),
}


@pytest.fixture
def folders(tmp_path):
    """Creates folders of another Python: `broken` contains packages that can't be imported, and `home` contains no
    compiled modules. Returns their parent folder."""
    for package in ("numpy", "yaml"):
        (tmp_path / "broken" / package).mkdir(parents=True)
        init = tmp_path / "broken" / package / "__init__.py"
        init.write_text("raise ImportError('of another Python')")
    stdlib = Path(sysconfig.get_path("stdlib"))
    home = tmp_path / "home/lib" / stdlib.name
    home.mkdir(parents=True)
    for path in stdlib.iterdir():
        if path.name != "lib-dynload":
            (home / path.name).symlink_to(path)
    return tmp_path


@pytest.mark.parametrize("machine", MACHINES)
def test_a_command_works_or_fails_with_one_line(project, tmp_path, folders, machine):
    before, command, refusal = MACHINES[machine]
    script = f'{before} "$@"'.replace("FOLDERS", str(folders))
    shell = ["unshare", "--mount"] if "mount" in script else []
    shell += ["bash", "-c", script, ""]
    if subprocess.run([*shell, "/bin/true"], capture_output=True, cwd=tmp_path).returncode:
        pytest.skip("this user may not make such a machine")
    (tmp_path / "täxt.txt").write_text("Once there were words, and they were told again. " * 200)
    program = command.replace("PROJECT", str(project)).split()
    done = subprocess.run(
        [*shell, sys.executable, *program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(project)},
        capture_output=True,
        text=True,
    )
    assert "Traceback" not in done.stdout + done.stderr, done.stderr
    assert done.returncode == (2 if refusal else 0), done.stderr
    if refusal:
        assert done.stderr.startswith("error: ") and refusal in done.stderr
        assert len(done.stderr.splitlines()) == 1
