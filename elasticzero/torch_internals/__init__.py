"""Gives access to the parts of torch that it does not offer in public.

`comm/gloo.py` depends on torch's internals too: it replaces a function of torch, and reads the
names of threads. ruff (SLF001, TID251) refuses private names and `torch._C` in every other file.
Each file says what to check after an upgrade of torch; `tests/unit/test_torch_internals.py` and the
tests that it names, which `make versions` runs, check what needs no GPU.
"""
