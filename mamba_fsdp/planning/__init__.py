"""Estimates the memory and time that a training run takes on given machines, and the settings that would fit."""
