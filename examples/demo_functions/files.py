"""Functions for files."""

import csv
import hashlib
import json
import os
import shutil


def append_line(path, line):
    """Append a line to a file."""
    with open(path, "a") as f:
        f.write(line + "\n")


def copy_file(source, target):
    """Copy a file and return the path of the copy."""
    return shutil.copyfile(source, target)


def count_lines(path):
    """Return the number of lines in a file."""
    with open(path) as f:
        return sum(1 for _ in f)


def file_extension(path):
    """Return the extension of a file's name, without the dot."""
    return os.path.splitext(path)[1].lstrip(".")


def file_hash(path):
    """Return the SHA-256 hash of a file's content."""
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while chunk := f.read(65536):
            digest.update(chunk)
    return digest.hexdigest()


def file_name(path):
    """Return the name of a file without its folder."""
    return os.path.basename(path)


def file_size(path):
    """Return the size of a file in bytes."""
    return os.path.getsize(path)


def find_files(folder, extension):
    """Return the paths of all files with an extension in a folder."""
    found = []
    for root, _, names in os.walk(folder):
        for name in names:
            if name.endswith(extension):
                found.append(os.path.join(root, name))
    return sorted(found)


def first_line(path):
    """Return the first line of a file."""
    with open(path) as f:
        return f.readline().rstrip("\n")


def folder_size(folder):
    """Return the size of all files in a folder in bytes."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            total += os.path.getsize(os.path.join(root, name))
    return total


def is_empty_file(path):
    """Return whether a file is empty."""
    return os.path.getsize(path) == 0


def last_line(path):
    """Return the last line of a file, or None if it is empty."""
    with open(path) as f:
        lines = f.read().splitlines()
    return lines[-1] if lines else None


def list_folders(folder):
    """Return the names of the folders in a folder."""
    return sorted(name for name in os.listdir(folder) if os.path.isdir(os.path.join(folder, name)))


def longest_line(path):
    """Return the longest line of a file."""
    with open(path) as f:
        return max(f.read().splitlines(), key=len)


def make_folder(path):
    """Make a folder, and the folders that it is in."""
    os.makedirs(path, exist_ok=True)
    return path


def read_bytes(path):
    """Return the content of a file as bytes."""
    with open(path, "rb") as f:
        return f.read()


def read_config(path):
    """Return the settings of a file with a name and a value on each line."""
    settings = {}
    with open(path) as f:
        for line in f:
            line = line.strip()
            if line and not line.startswith("#"):
                name, value = line.split("=", 1)
                settings[name.strip()] = value.strip()
    return settings


def read_csv(path):
    """Return the rows of a CSV file as a list of dictionaries."""
    with open(path, newline="") as f:
        return list(csv.DictReader(f))


def read_json(path):
    """Return the value in a JSON file."""
    with open(path) as f:
        return json.load(f)


def read_lines(path):
    """Return the lines of a file."""
    with open(path) as f:
        return f.read().splitlines()


def read_numbers(path):
    """Return the numbers in a file, one on each line."""
    with open(path) as f:
        return [float(line) for line in f if line.strip()]


def read_text(path):
    """Return the text of a file."""
    with open(path) as f:
        return f.read()


def read_words(path):
    """Return the words in a file."""
    with open(path) as f:
        return f.read().split()


def remove_file(path):
    """Remove a file, and return whether there was one."""
    if not os.path.exists(path):
        return False
    os.remove(path)
    return True


def replace_in_file(path, old, new):
    """Replace a text in a file, and return how often it was found."""
    with open(path) as f:
        text = f.read()
    with open(path, "w") as f:
        f.write(text.replace(old, new))
    return text.count(old)


def search_file(path, word):
    """Return the numbers of the lines of a file that contain a word."""
    with open(path) as f:
        return [i for i, line in enumerate(f, 1) if word in line]


def write_csv(path, rows):
    """Write a list of dictionaries to a CSV file."""
    with open(path, "w", newline="") as f:
        writer = csv.DictWriter(f, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def write_json(path, value):
    """Write a value to a JSON file."""
    with open(path, "w") as f:
        json.dump(value, f, indent=2)


def write_lines(path, lines):
    """Write lines to a file."""
    with open(path, "w") as f:
        for line in lines:
            f.write(line + "\n")


def write_text(path, text):
    """Write a text to a file, and return the number of characters."""
    with open(path, "w") as f:
        return f.write(text)
