"""The one exception that is the user's to fix; the command line prints it as a single line."""


class InputError(ValueError):
    """Bad input: the message says what is wrong, where (file, sample id, flag) and how to mend it."""
