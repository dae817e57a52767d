"""What 1.train.sbatch asks Python to do: read the settings, check the nodes, start a node's ranks. No torch but in node.py."""
