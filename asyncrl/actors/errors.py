"""Errors of the actors that a user reads."""


class RunFailed(Exception):
    """The run cannot go on; the text is the reason and, where there is one, the remedy."""
