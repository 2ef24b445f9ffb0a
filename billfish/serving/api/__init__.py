"""OpenAI's API: what clients ask, checked and turned into requests to the engine, and answers in its JSON."""
