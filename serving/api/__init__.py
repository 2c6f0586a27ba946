"""The OpenAI-compatible HTTP API, on asyncio; it reaches the engine only through `AsyncEngine`."""
