"""The HTTP server: paths, API keys, metrics, the chat page, start and end."""
