"""Does all that comes before a training, and leaves nothing: `./1.train.sbatch --check`. For the cluster's own Python,
see host.py."""

import contextlib
import glob
import os
import shutil
from typing import List, Sequence

from mamba_fsdp.launch import slurm
from mamba_fsdp.launch.containers import folders_behind_links
from mamba_fsdp.launch.decision import ENDED
from mamba_fsdp.launch.host import PROJECT, Variables, say
from mamba_fsdp.launch.node_command import on_node
from mamba_fsdp.launch.plan_reader import Plan
from mamba_fsdp.launch.slurm_training import GiveUp, SlurmTraining, make_training
from mamba_fsdp.launch.start_folder import StartFolder
from mamba_fsdp.launch.supervisor import StopAsked, TooLate

TOKENIZER_TEXTS = "text"  # in the start's folder


def check_nodes(words: List[str], variables: Variables) -> int:
    """Prepares and checks the nodes of this job, and tries the tokenizer on the first. Returns the exit code."""
    check = make_training(words, variables, ClusterCheck)
    with check.guarded():
        return check.check()


class ClusterCheck(SlurmTraining):
    """A check. It runs where salloc was called, which need not be a node of the job."""

    keeps_record = False
    made: Sequence[str] = ()  # folders that are removed again

    def check(self) -> int:
        """Returns the exit code."""
        try:
            _, start = self.prepare()
            self.without_lost_nodes(lambda: self.try_tokenizer(start))
        except (StopAsked, TooLate):
            return ENDED
        except GiveUp as trouble:
            if str(trouble):
                say(f"error: {trouble}")
            return trouble.code
        finally:
            if self.folder:
                self.folder.remove()
            for folder in reversed(self.made):
                with contextlib.suppress(OSError):
                    os.rmdir(folder)
        if self.pool.left_out:
            return 1
        say("fit to train")
        return 0

    def make_folder(self, plan: Plan, folder: StartFolder) -> None:
        self.made = missing_folders(plan.run_folder) + missing_folders(plan.missing_data)
        super().make_folder(plan, folder)

    def count_start(self) -> None:
        """Does nothing: a check is not a start."""

    def make_data(self) -> None:
        """Does nothing: data that is missing is made by the training."""

    def folders_of(self, plan: Plan) -> List[str]:
        """Returns the folders that the training needs, without that of compiled kernels."""
        if not self.environment.image:
            return []
        return plan.paths + folders_behind_links(plan.paths)

    def on_first_node(self, command: List[str], with_network: bool = True) -> List[str]:
        """Returns what runs a command on the first node."""
        self.busy = set(self.job.nodes[:1])
        return slurm.on_hosts(self.job.nodes[:1]) + self.container + on_node(command)

    def try_tokenizer(self, folder: StartFolder) -> None:
        """Tokenises a megabyte of this project's own text on the first node, as get_dataset.py does. Raises GiveUp
        if that fails."""
        texts = os.path.join(folder.path, TOKENIZER_TEXTS)
        os.makedirs(texts, exist_ok=True)
        sources = sorted(glob.glob(os.path.join(glob.escape(PROJECT), "mamba_fsdp", "*", "*.py")))
        # Two long documents, which two threads encode at the same time.
        for name in ("train", "validation"):
            with open(os.path.join(texts, name + ".txt"), "wb") as together:
                for source in sources:
                    with open(source, "rb") as file:
                        shutil.copyfileobj(file, together)
        words = [self.environment.python, os.path.join(PROJECT, "get_dataset.py"), texts]
        words += [os.path.join(folder.path, "tokens"), "--splits=official", "--tokenizer=train:512"]
        output = self.supervisor.output_of(self.on_first_node(words), with_errors=True)
        if self.supervisor.last_code == 0:
            return
        say(output.rstrip("\n"))
        lines = [line for line in output.splitlines() if not line.startswith("srun: ")]
        last = lines[-1] if lines else "it prints nothing"
        raise GiveUp(
            f"the tokenizer fails on {self.job.nodes[0]}: {last}", self.supervisor.last_code
        )


def missing_folders(path: str) -> List[str]:
    """Returns the folder and those above it that are not there, the highest first."""
    missing: List[str] = []
    while path and not os.path.exists(path):
        missing.insert(0, path)
        path = os.path.dirname(path)
    return missing
