"""Writing checkpoints: a plan, then one pass that can be killed and continued."""
