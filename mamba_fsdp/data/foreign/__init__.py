"""Tokenised text in other projects' formats, read where it lies.

Each format's module says whether a path holds it (`recognise`) and finds its files and what lies where in them
(`open_source`); index.py keeps the finds, indexed.py reads by them.
"""
