"""Adapters between other libraries and ours. A library or a model is named here and in the demo, nowhere else."""
