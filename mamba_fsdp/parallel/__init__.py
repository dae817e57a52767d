"""Process groups, sharding, precision, activation checkpointing, sequences that ranks share; what differs between versions
of torch lives here."""
