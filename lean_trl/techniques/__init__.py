"""Memory techniques: each a class in a file of its own, called through the one ordered list in apply.py."""

from lean_trl.techniques.apply import apply_techniques

__all__ = ["apply_techniques"]
