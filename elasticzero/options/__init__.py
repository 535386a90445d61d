"""Holds the table of training options, which the launcher and `python train.py` read. Pure."""
