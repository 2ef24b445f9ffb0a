"""Between the processes that speak HTTP (the fronts) and the one that has the engine: messages, and who sends them."""
