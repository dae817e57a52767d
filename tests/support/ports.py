"""Chooses ports and environment variables for ranks that connect to each other."""

import socket


def hold_port() -> socket.socket:
    """Returns a socket that reserves a free port. Other processes do not get it when they ask for any port, but
    TCPStore can use it by its number."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("", 0))
    return held


def rank_environment(rank, count, port, per_node=None):
    """Returns the environment variables that torchrun sets for a rank. per_node: the number of ranks per node; None:
    all ranks are on one node."""
    per_node = per_node or count
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_RANK": str(rank % per_node),
        "LOCAL_WORLD_SIZE": str(per_node),
        "GROUP_RANK": str(rank // per_node),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
