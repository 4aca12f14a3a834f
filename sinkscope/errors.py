"""The two ways a run can end badly. Both carry one or two lines for a person; neither needs a traceback."""


class SinkscopeError(Exception):
    """A run that failed (exit status 1): the message says what was wrong and what to do."""


class InputError(SinkscopeError):
    """Wrong arguments or input (exit status 2): nothing was computed and nothing was written."""
