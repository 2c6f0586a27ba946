"""The error of a request that cannot be served as it stands."""


class RequestError(ValueError):
    """A bad request: one message naming the value and the bound; nothing was changed by refusing it.

    `parameter` is the name of the request's field at fault, if one is.
    """

    def __init__(self, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter
