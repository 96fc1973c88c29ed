class ServerError(Exception):
    """A server could not be installed, started or stopped. The message is shown as it is."""
