"""GPU kernels, importable without lean_trl: each with its plain PyTorch reference beside it.

There are none yet: every op of lean_trl runs on its plain or torch backend.
"""
