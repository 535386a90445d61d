"""Provides the elastic launcher: the agent of a node and its command line. Imports no torch."""

if __name__ == "launcher":
    raise ImportError("import elasticzero.launcher instead: a bare `launcher` may be yours")
