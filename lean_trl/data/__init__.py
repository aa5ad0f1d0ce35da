"""Rows -> Examples -> plan -> Batches, all on the host."""
