"""Files on storage that fails now and then (patience.py), and that anyone may have written: as typed JSON, as YAML of
texts, with formats and versions."""
