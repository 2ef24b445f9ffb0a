"""One model for many requests: a thread that runs decode steps over a batch. Knows nothing of HTTP."""
