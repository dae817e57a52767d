"""What 1.train.sbatch asks Python to do: read settings, check nodes, start a node's ranks. Torch in node.py only."""
