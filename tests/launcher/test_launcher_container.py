"""1.train.sbatch with an image: what Slurm's container plugin is asked for, recorded by stand-ins for Slurm's
commands."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# Writes its words down, then runs the command as each node would, one after the other.
RECORDING_SRUN = f'''#!{sys.executable}
import json, os, subprocess, sys
with open(os.environ["RECORD"], "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
words = sys.argv[1:]
command = words[[i for i, word in enumerate(words) if not word.startswith("--")][0]:]
nodes = ["node1"] if "--nodes=1" in words else ["node1", "node2"]
if "mamba_fsdp.launch.node" in command:
    run = command[command.index("mamba_fsdp.launch.node") + 1].split("/failures/")[0]
    open(run + "/status.json", "w").write('{{"status": "finished"}}')
    sys.exit(0)
inside = {{**os.environ, "PATH": os.environ["IMAGE_PATH"]}}  # a container has none of Slurm's commands
sys.exit(max(subprocess.run(command, env={{**inside, "SLURMD_NODENAME": node}}).returncode for node in nodes))
'''
SCONTROL = """#!/bin/sh
case "$*" in
"show hostnames"*) printf "node1\\nnode2\\n" ;;
"show job 77") echo "   Command=$PROJECT/1.train.sbatch --some=words" ;;
esac
"""


@pytest.fixture
def submit(launcher_project, tmp_path):
    """submit(*settings, **environment) -> (finished process, what srun was asked for), as Slurm would run the file."""
    commands, image = tmp_path / "commands", tmp_path / "image"
    commands.mkdir()
    image.mkdir()
    # With the stamp beside it.
    (image / "python3").write_text(f'#!/bin/sh\nexec "{launcher_project}/.venv/bin/python" "$@"\n')
    (image / "python3").chmod(0o755)
    for name in ("bash", "basename", "dirname", "readlink", "hostname"):
        (image / name).symlink_to(shutil.which(name))
    for name, text in (("srun", RECORDING_SRUN), ("scontrol", SCONTROL), ("squeue", "#!/bin/sh\necho RUNNING\n")):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    record = tmp_path / "record"
    spool = tmp_path / "spool"
    spool.mkdir()

    def run(*settings, **environment):
        shutil.copy(launcher_project / "1.train.sbatch", spool / "slurm_script")
        slurm = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "node[1-2]", "PROJECT": str(launcher_project),
                 "RECORD": str(record), "IMAGE_PATH": str(image), "PATH": f"{commands}:{os.environ['PATH']}"}
        done = subprocess.run(["bash", spool / "slurm_script", *settings], env={**os.environ, **slurm, **environment},
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
        return done, [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []

    return run


def option(words, name):
    """The value of --name=VALUE, which must be there once."""
    value, = [word.split("=", 1)[1] for word in words if word.startswith(f"--{name}=")]
    return value


def test_exact_container_arguments(submit, launcher_project, tmp_path):
    """Spaces included: Pyxis passes mounts on as lines of an fstab, where a space is written \\040."""
    (launcher_project / "mamba-train.sqsh").touch()
    data, runs = tmp_path / "big data" / "store", tmp_path / "all runs"
    data.mkdir(parents=True)
    runs.mkdir()
    done, asked = submit(f"--dataset_path={data}", f"--save_ckpt_path={runs}/mine", "--model_name=demo", "--seed=7")
    assert done.returncode == 0, done.stdout
    plan, *later = asked
    escaped = {path: str(path).replace(" ", r"\040") for path in (launcher_project, runs / "mine", data)}
    mounts = ",".join(f"{path}:{path}" for path in escaped.values())
    assert option(plan, "container-mounts") == ",".join(f"{path}:{path}"
                                                        for path in (escaped[launcher_project], escaped[data])), \
        "to read the settings, what the words of the command name"
    assert len(later) == 3, "the nodes' reports, their comparison, the training"
    for words in later:
        assert option(words, "container-mounts") == mounts
    for words in asked:
        assert option(words, "container-image") == f"{launcher_project}/mamba-train.sqsh"
        assert option(words, "container-workdir") == str(launcher_project)
        assert "--no-container-mount-home" in words
    training = asked[-1]
    command = training[training.index(f"{launcher_project}/1.train.sbatch"):]
    assert command == [f"{launcher_project}/1.train.sbatch", "--on-node", "python3", "-m", "mamba_fsdp.launch.node",
                       f"{runs}/mine/failures/77.0", "--nnodes=2", "--rdzv-backend=c10d", "--rdzv-id=77.0",
                       "--rdzv-endpoint=node1:20077", "--rdzv-conf=join_timeout=900,read_timeout=900", "training.py",
                       f"--dataset_path={data}", f"--save_ckpt_path={runs}/mine", "--model_name=demo", "--seed=7"]
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--label", "--kill-on-bad-exit=1"} <= set(training)
    assert "--auto-resume=1" not in training


def test_the_home_folder_and_what_links_leave_out_is_not_mounted(submit, launcher_project, tmp_path):
    """data/ in the project is a link to the shared file system: its target must be mounted, nothing else."""
    (launcher_project / "mamba-train.sqsh").touch()
    (tmp_path / "lustre").mkdir()
    (launcher_project / "data").symlink_to(tmp_path / "lustre")
    (tmp_path / "lustre/builtin").mkdir()
    done, asked = submit("--save_ckpt_path=runs/a", HOME=str(tmp_path))
    assert done.returncode == 0, done.stdout
    sources = [mount.split(":")[0] for mount in option(asked[-1], "container-mounts").split(",")]
    assert sources == [str(launcher_project).replace(" ", r"\040"), f"{tmp_path}/lustre/builtin"]


def test_further_mounts_and_another_image(submit, launcher_project, tmp_path):
    (launcher_project / "data/builtin").mkdir(parents=True)
    for name in ("my images", "a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "my images/i.sqsh").touch()
    done, asked = submit("--save_ckpt_path=runs/a", IMAGE=f"{tmp_path}/my images/i.sqsh",
                         MOUNTS=f"{tmp_path}/a,{tmp_path}/b")
    assert done.returncode == 0, done.stdout
    for words in asked:
        assert option(words, "container-image") == f"{tmp_path}/my images/i.sqsh"
        assert option(words, "container-mounts").split(",")[1:] == [f"{tmp_path}/a:{tmp_path}/a",
                                                                    f"{tmp_path}/b:{tmp_path}/b"]


@pytest.mark.parametrize("name", ["with,comma", "with:colon"])
def test_names_that_cannot_be_mounted_are_refused(submit, launcher_project, tmp_path, name):
    (launcher_project / "mamba-train.sqsh").touch()
    (tmp_path / name).mkdir()
    done, asked = submit(f"--save_ckpt_path={tmp_path}/{name}")
    assert done.returncode == 2 and not asked
    assert "a comma or a colon" in done.stdout


def test_a_mount_that_is_not_there_is_refused_by_name(submit, launcher_project):
    (launcher_project / "mamba-train.sqsh").touch()
    done, _ = submit("--load_ckpt_path=/nowhere/old-run")
    assert done.returncode == 2
    assert "there is no /nowhere/old-run on node1" in done.stdout


def test_an_image_made_from_other_requirements_is_refused(submit, launcher_project):
    (launcher_project / "mamba-train.sqsh").touch()
    with open(launcher_project / "requirements/cpu.txt", "a") as file:
        file.write("surprise==1\n")
    done, asked = submit()
    assert done.returncode == 2 and len(asked) == 1, "found before any node is asked"
    assert "was made from another requirements/cpu.txt" in done.stdout and "build and import it again" in done.stdout


def test_hyperpod_resumes_by_itself(submit, launcher_project, tmp_path):
    (launcher_project / "mamba-train.sqsh").touch()
    (launcher_project / "data/builtin").mkdir(parents=True)
    script = launcher_project / "1.train.sbatch"
    script.write_text(script.read_text().replace("HYPERPOD_FOLDER=/opt/sagemaker_cluster",
                                                 f"HYPERPOD_FOLDER={tmp_path}"))
    done, asked = submit("--save_ckpt_path=runs/a")
    assert done.returncode == 0, done.stdout
    assert "--auto-resume=1" in asked[-1]


def test_profile(submit, launcher_project):
    """torch's is a setting of training.py; nsys runs around the launcher of each node, with a file for each."""
    (launcher_project / "data/builtin").mkdir(parents=True)
    (launcher_project / "mamba-train.sqsh").touch()
    done, asked = submit("--save_ckpt_path=runs/a", PROFILE="torch")
    assert done.returncode == 0 and asked[-1][-1] == "--use_profiler=true"
    done, asked = submit("--save_ckpt_path=runs/a", PROFILE="nsys")
    words = asked[-1]
    assert words[words.index("--on-node") + 1:][:4] == ["nsys", "profile", "--trace=cuda,nvtx",
                                                        f"--output={launcher_project}/runs/a/profile/nsys_77.0_%h"]
    assert Path(launcher_project / "runs/a/profile").is_dir()
    done, asked = submit("--save_ckpt_path=runs/a", PROFILE="perf")
    assert done.returncode == 2 and "choose torch or nsys" in done.stdout
