"""The launcher: reads the settings, checks the nodes, and starts each node's ranks. Only node.py's
part of it imports torch.
"""
