"""What the commands share: flags and their checks, errors in one line, and tables."""
