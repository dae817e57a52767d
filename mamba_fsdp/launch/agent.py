"""Runs torchrun's elastic agent. The agent meets the agents of the other nodes, assigns the rank
numbers and starts this node's ranks.
"""

import logging
import os
import socket
from argparse import Namespace

from torch.distributed import DistError
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError
from torch.distributed.launcher.api import elastic_launch

from mamba_fsdp.errors import first_line
from mamba_fsdp.launch.failures import Failure, sort_key
from mamba_fsdp.launch.machine import LOOPBACK, check_loopback, node_name
from mamba_fsdp.launch.watcher import Watcher
from mamba_fsdp.parallel.world import EXPECTED_RANKS, allow_many_files

DEFAULT_OPTIONS = ["--rdzv-backend=c10d", "--monitor-interval=0.1"]


def read_options(args: list[str]) -> Namespace:
    """Parses torchrun's options and the command of the ranks from command-line arguments.

    With --standalone, the rendezvous uses the loopback interface. Raises UserError if that
    interface does not work.
    """
    options = torchrun.parse_args([*DEFAULT_OPTIONS, *args])
    if options.standalone:
        check_loopback()
        # The host name need not resolve, for example on a laptop that has joined another network.
        options.rdzv_endpoint = f"{LOOPBACK}:0"
        options.local_addr = LOOPBACK
        # Torch looks up the fully qualified name many times, and each look-up takes ten seconds if
        # the name server is unreachable.
        socket.getfqdn = lambda name="": name or node_name()
        # Each TCPStore looks up the name of 127.0.0.1 for its log messages. Without this option, glibc
        # waits five seconds, twice, for a name server that is unreachable.
        os.environ.setdefault("RES_OPTIONS", "timeout:1")
    return options


def run_ranks(options: Namespace, watcher: Watcher) -> Failure | None:
    """Runs this node's ranks until they exit, and returns the first failure among them.

    Returns None if all ranks succeeded. Errors of the rendezvous become a Failure of the node.
    """
    logging.disable(logging.ERROR)  # hides torch's failure report: ours has more details
    allow_many_files()
    config, command, arguments = torchrun.config_from_args(options)
    os.environ[EXPECTED_RANKS] = str(config.max_nodes * config.nproc_per_node)
    try:
        elastic_launch(config, command)(*arguments)
    except ChildFailedError as error:
        failures = [
            Failure.from_rank(rank, process)
            for rank, process in error.failures.items()
            if process.pid not in watcher.killed or os.path.isfile(process.error_file)
        ]
        return min(failures, key=sort_key)
    except RendezvousClosedError:
        return Failure.from_node("error: another node has closed the rendezvous")
    except (RendezvousError, DistError) as error:
        return Failure.from_node(
            f"error: {node_name()} could not join the rendezvous, or lost the connection to the first node. Check that it can "
            "reach the first node by its name, and that the firewall or security group allows connections between nodes. "
            f"{first_line(error.__cause__ or error)}"
        )
    return None
