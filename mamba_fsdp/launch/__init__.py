"""The launcher reads the settings, checks the nodes, and starts each node's ranks. Most modules do
not import torch, so that errors in the settings are reported within seconds.
"""
