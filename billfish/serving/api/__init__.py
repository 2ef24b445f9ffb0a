"""APIs of OpenAI, Anthropic and Ollama, a file for each: all translate to one conversation and one stream of events."""
