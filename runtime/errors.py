"""The two errors that are told in one line."""


class ConfigError(ValueError):
    """A mistake in the options, or in what they name. The scripts print it as one line and exit with code 2."""


class RunError(RuntimeError):
    """Ends a run for a reason that is no bug. The scripts print it as one line and exit with code 1."""
