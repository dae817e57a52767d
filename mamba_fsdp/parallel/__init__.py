"""Process groups, sharding, precision, activation checkpointing: what differs between versions of torch lives here."""
