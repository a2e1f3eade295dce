"""Common parts of the commands: flags and their checks, errors in one line, and tables."""
