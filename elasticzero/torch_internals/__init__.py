"""Gives access to the parts of torch that it does not offer in public.

`comm/gloo.py` and `parallel/fsdp_uses.py` depend on torch's internals too, and say what to check.
ruff (SLF001, TID251) refuses private names and `torch._C` in every other file.
Each file says what to check after an upgrade of torch; `tests/unit/test_torch_internals.py` and the
tests that it names, which `make versions` runs, check what needs no GPU.
"""
