"""Memory techniques: a class in a file each, called through the one list in apply.py."""

from lean_trl.techniques.apply import apply_techniques

__all__ = ["apply_techniques"]
