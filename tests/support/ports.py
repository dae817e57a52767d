"""Ports for ranks that are to meet."""

import socket


def hold_port() -> socket.socket:
    """A socket that keeps a free port from whoever asks for any, but not from TCPStore, which names it."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("", 0))
    return held
