"""The one error type for mistakes that the user can mend."""


class UserError(Exception):
    """Bad input, named: what was given, where, what is allowed, what to do.

    The command shows it as one paragraph and exits with code 2 (``--traceback`` shows the rest).
    Anything that is not a ``UserError`` is a defect of ours and keeps its traceback.
    """
