"""Turns text, or token ids in another format, into token stores; `kinds` classifies paths for every command."""
