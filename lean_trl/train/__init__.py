"""The loop and what it is made of: one step, methods, optimizer, schedule, metrics, checkpoints."""
