"""``python -m mxfp4_ops demo``: a whole model around the packed experts, beside the same model with bf16 experts."""
