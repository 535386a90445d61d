"""Draws training scripts from a grammar, and trains each by plain torch and through faults.

A draw is one script, one strategy and one sequence of worlds. Its result equals that of one plain
process, or it is refused in a sentence before a second step. `elements` says what the grammar is
made of; `buffers`, `parameters`, `optimizers`, `schedules`, `changes` and `calls` are its tables;
`draws` draws, `render` writes the script, `play` trains and judges, `shrink` drops what a failure
does not need. `python -m tests.integration.generator 0 100` plays seeds by hand.
"""
