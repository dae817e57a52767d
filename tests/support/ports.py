"""Ports and names for ranks that are to meet."""

import socket


def hold_port() -> socket.socket:
    """A socket that keeps a free port from whoever asks for any, but not from TCPStore, which names it."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("", 0))
    return held


def rank_environment(rank, count, port, per_node=None):
    """What torchrun sets for a rank. per_node: ranks of a node; None: all."""
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
