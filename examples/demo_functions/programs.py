"""Functions that programs are made of."""

import argparse
import functools
import logging
import os
import shutil
import subprocess
import sys
import time


def ask(question, default=None):
    """Ask a question, and return the answer or a default."""
    answer = input(question + " ").strip()
    return answer or default


def ask_yes_no(question):
    """Ask a question until the answer is yes or no."""
    while True:
        answer = input(question + " [y/n] ").strip().lower()
        if answer in ("y", "yes"):
            return True
        if answer in ("n", "no"):
            return False


def cached(function):
    """Return a function that remembers its results."""
    results = {}

    @functools.wraps(function)
    def wrapper(*args):
        if args not in results:
            results[args] = function(*args)
        return results[args]

    return wrapper


def environment(name, default=None):
    """Return the value of an environment variable."""
    return os.environ.get(name, default)


def main(argv=None):
    """Copy files to a folder."""
    parser = argparse.ArgumentParser(description="Copy files to a folder.")
    parser.add_argument("files", nargs="+", help="the files to copy")
    parser.add_argument("--folder", default=".", help="the folder to copy to")
    parser.add_argument("--verbose", action="store_true", help="print each name")
    args = parser.parse_args(argv)
    for name in args.files:
        if args.verbose:
            print(name)
        shutil.copy(name, args.folder)
    return 0


def make_logger(name, level=logging.INFO):
    """Return a logger that writes to the terminal."""
    logger = logging.getLogger(name)
    logger.setLevel(level)
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    return logger


def parse_arguments(argv=None):
    """Return the arguments of a command that reads a file."""
    parser = argparse.ArgumentParser(description="Read a file.")
    parser.add_argument("path", help="the file to read")
    parser.add_argument("--lines", type=int, default=10, help="the number of lines")
    return parser.parse_args(argv)


def print_error(message):
    """Print a message to the standard error output."""
    print(message, file=sys.stderr)


def print_table(rows):
    """Print rows of values as a table with columns."""
    widths = [max(len(str(value)) for value in column) for column in zip(*rows)]
    for row in rows:
        print("  ".join(str(value).ljust(width) for value, width in zip(row, widths)))


def progress_bar(done, total, width=40):
    """Return a progress bar as text."""
    n = width * done // total
    return "[" + "#" * n + " " * (width - n) + "]"


def retry(function, times, delay=1.0):
    """Call a function until it succeeds, at most some times."""
    for attempt in range(times):
        try:
            return function()
        except Exception:
            if attempt == times - 1:
                raise
            time.sleep(delay)


def run_command(command):
    """Run a command, and return its output."""
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return result.stdout


def timed(function):
    """Return a function that prints how long it took."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        start = time.perf_counter()
        result = function(*args, **kwargs)
        print(f"{function.__name__}: {time.perf_counter() - start:.3f} s")
        return result

    return wrapper
