"""Implements `./1.train.sbatch --check`: prepares the nodes as for a training, and removes all files
that the check has made.

This module runs on the cluster's own Python; host.py describes the restrictions.
"""

import contextlib
import glob
import os
import shutil
from typing import List, Sequence

from mamba_fsdp.launch import slurm
from mamba_fsdp.launch.decision import EXIT_SIGTERM
from mamba_fsdp.launch.host import PROJECT, Variables, print_line, with_node_setup
from mamba_fsdp.launch.plan_reader import Plan
from mamba_fsdp.launch.slurm_training import SlurmTraining, StartFailed, make_training
from mamba_fsdp.launch.start_folder import StartFolder
from mamba_fsdp.launch.supervisor import DeadlineExceeded, StopRequested

TOKENIZER_TEXTS = "text"  # a folder in the folder of the start


def check_nodes(args: List[str], variables: Variables) -> int:
    """Prepares and checks the nodes of this job, and tries the tokenizer on the first node. Returns
    the exit code.
    """
    check = make_training(args, variables, ClusterCheck)
    with check.guard_nodes():
        return check.check()


class ClusterCheck(SlurmTraining):
    """Controls a check of the cluster. The host where salloc was called runs this program. That host
    need not be a node of the job.
    """

    is_check = True
    made: Sequence[str] = ()  # folders to remove at the end

    def check(self) -> int:
        """Runs the check and returns the exit code."""
        try:
            _, start = self.prepare()
            self.retry_without_lost_nodes(lambda: self.try_tokenizer(start))
        except (StopRequested, DeadlineExceeded):
            return EXIT_SIGTERM
        except StartFailed as error:
            if str(error):
                print_line(f"error: {error}")
            return error.code
        finally:
            if self.folder:
                self.folder.remove()
            for folder in reversed(self.made):
                with contextlib.suppress(OSError):
                    os.rmdir(folder)
        if self.pool.left_out:
            return 1
        print_line("ready to train")
        return 0

    def make_folder(self, plan: Plan, folder: StartFolder) -> None:
        """Makes the folder of this start, and remembers which folders above it are new."""
        self.made = missing_folders(plan.run_folder) + missing_folders(plan.missing_data)
        super().make_folder(plan, folder)

    def count_start(self) -> None:
        """Does nothing, because a check does not count as a start of the training."""

    def make_data(self) -> None:
        """Does nothing, because the training itself makes missing data."""

    def srun_on_first_node(self, command: List[str], with_network: bool = True) -> List[str]:
        """Returns the srun command line that runs a command on the first node."""
        self.busy_nodes = set(self.job.nodes[:1])
        return (
            slurm.srun_without_gpus(self.job.nodes[:1]) + self.container + with_node_setup(command)
        )

    def try_tokenizer(self, folder: StartFolder) -> None:
        """Tokenizes one megabyte of this project's source code on the first node with
        get_dataset.py.

        Raises StartFailed if that fails.
        """
        texts = os.path.join(folder.path, TOKENIZER_TEXTS)
        os.makedirs(texts, exist_ok=True)
        sources = sorted(glob.glob(os.path.join(glob.escape(PROJECT), "mamba_fsdp", "*", "*.py")))
        # Two long documents, so that two threads encode at the same time.
        for name in ("train", "validation"):
            with open(os.path.join(texts, name + ".txt"), "wb") as document:
                for source in sources:
                    with open(source, "rb") as file:
                        shutil.copyfileobj(file, document)
        args = [self.environment.python, os.path.join(PROJECT, "get_dataset.py"), texts]
        args += [os.path.join(folder.path, "tokens"), "--splits=official", "--tokenizer=train:512"]
        output = self.supervisor.run_for_output(self.srun_on_first_node(args), with_errors=True)
        if self.supervisor.last_code == 0:
            return
        print_line(output.rstrip("\n"))
        lines = [line for line in output.splitlines() if not line.startswith("srun: ")]
        last = lines[-1] if lines else "no output"
        raise StartFailed(
            f"the tokenizer failed on {self.job.nodes[0]}: {last}", self.supervisor.last_code
        )


def missing_folders(path: str) -> List[str]:
    """Returns the folders on this path that do not exist, the topmost first."""
    missing: List[str] = []
    while path and not os.path.exists(path):
        missing.insert(0, path)
        path = os.path.dirname(path)
    return missing
