"""What 1.train.sbatch asks Python to do: read settings, look at a node, start a node's ranks. Torch in node.py and failures.py only."""
