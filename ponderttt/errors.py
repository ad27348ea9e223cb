"""The one exception whose message is meant for the person at the terminal."""


class UserError(Exception):
    """Something the user can mend: the message names the file or key, and the remedy."""
