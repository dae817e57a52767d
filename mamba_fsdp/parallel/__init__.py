"""Process groups, sharding, precision, activation checkpointing: what differs between torch 2.2 and newer lives here."""
