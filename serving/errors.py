"""Errors that say something about the engine's state rather than about a request."""


class QueueFullError(RuntimeError):
    """The waiting queue is at its limit; the same request may be accepted later."""
