"""Estimates the memory and the time of a training run on given machines, and finds settings that fit."""
