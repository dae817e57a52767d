"""Tokenised text in other projects' formats, read where it lies.

Each format's module says whether a path holds it (`recognise`), and which files and what in them (`plan`); index.py
keeps what they find, indexed.py reads by it.
"""
