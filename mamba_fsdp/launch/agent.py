"""Runs torchrun's agent, as torch.distributed offers it: it meets the other nodes' agents, numbers the ranks and starts
them."""

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
from mamba_fsdp.launch.failures import Failure, order
from mamba_fsdp.launch.machine import LOOPBACK, check_loopback, node_name
from mamba_fsdp.launch.watcher import Watcher
from mamba_fsdp.parallel.world import EXPECTED_RANKS, allow_many_files

USUAL = ["--rdzv-backend=c10d", "--monitor-interval=0.1"]


def read_options(words: list[str]) -> Namespace:
    """Returns torchrun's options, and the program that it is to start, from a command line."""
    options = torchrun.parse_args([*USUAL, *words])
    if options.standalone:
        check_loopback()
        # The machine's own name may lead nowhere, as that of a laptop in another network.
        options.rdzv_endpoint = f"{LOOPBACK}:0"
        options.local_addr = LOOPBACK
        # Torch asks for the full name again and again, and a name server that is away takes ten seconds each time.
        socket.getfqdn = lambda name="": name or node_name()
        # Each store asks for the name of 127.0.0.1, for its own messages; glibc would wait five seconds, twice.
        os.environ.setdefault("RES_OPTIONS", "timeout:1")
    return options


def run_ranks(options: Namespace, watcher: Watcher) -> Failure | None:
    """Runs the ranks to their end. Returns this node's first failure."""
    logging.disable(logging.ERROR)  # torch's own report of a failure: ours, at the end, says more
    allow_many_files()
    config, command, arguments = torchrun.config_from_args(options)
    os.environ[EXPECTED_RANKS] = str(config.max_nodes * config.nproc_per_node)
    try:
        elastic_launch(config, command)(*arguments)
    except ChildFailedError as error:
        failures = [
            Failure.of_rank(rank, process)
            for rank, process in error.failures.items()
            if process.pid not in watcher.killed or os.path.isfile(process.error_file)
        ]
        return min(failures, key=order)
    except RendezvousClosedError:
        return Failure.of_node("error: another node has given up")
    except (RendezvousError, DistError) as error:
        return Failure.of_node(
            f"error: {node_name()} could not meet the other nodes, or has lost the first. Can it reach the first by its "
            "name, and does the firewall or security group let the nodes connect? "
            f"{first_line(error.__cause__ or error)}"
        )
    return None
