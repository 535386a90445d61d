"""Trains, and then ends with a status that says otherwise."""

import sys

import elasticzero as ez

ez.run(lambda session: None)
sys.exit(3)
