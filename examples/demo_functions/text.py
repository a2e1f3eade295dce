"""Functions for text."""

import re
import string
from collections import Counter


def abbreviate(text, length):
    """Return a text cut to a length, with three dots at the end if it was longer."""
    if len(text) <= length:
        return text
    return text[: length - 3] + "..."


def caesar_cipher(text, shift):
    """Return a text with each letter moved along the alphabet."""
    result = []
    for char in text:
        if char.isalpha():
            first = ord("a") if char.islower() else ord("A")
            char = chr((ord(char) - first + shift) % 26 + first)
        result.append(char)
    return "".join(result)


def capitalize_words(text):
    """Return a text with a capital letter at the beginning of each word."""
    return " ".join(word.capitalize() for word in text.split())


def center_text(text, width):
    """Return a text in the middle of a line of a width."""
    left = (width - len(text)) // 2
    return " " * left + text


def common_prefix(a, b):
    """Return the longest beginning that two texts share."""
    n = 0
    while n < len(a) and n < len(b) and a[n] == b[n]:
        n += 1
    return a[:n]


def count_letters(text):
    """Return how often each letter occurs in a text."""
    return Counter(char for char in text.lower() if char.isalpha())


def count_vowels(text):
    """Return the number of vowels in a text."""
    return sum(char in "aeiou" for char in text.lower())


def count_words(text):
    """Return how often each word occurs in a text."""
    counts = {}
    for word in text.lower().split():
        counts[word] = counts.get(word, 0) + 1
    return counts


def edit_distance(a, b):
    """Return the number of edits that turn one text into another."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        previous, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (x != y))
    return row[-1]


def extract_emails(text):
    """Return the email addresses in a text."""
    return re.findall(r"[\w.+-]+@[\w-]+\.[\w.]+", text)


def extract_numbers(text):
    """Return the numbers in a text."""
    return [float(number) for number in re.findall(r"-?\d+\.?\d*", text)]


def hamming_distance(a, b):
    """Return the number of positions where two texts of the same length differ."""
    return sum(x != y for x, y in zip(a, b))


def indent(text, n):
    """Return a text with n spaces before each line."""
    return "\n".join(" " * n + line for line in text.splitlines())


def is_anagram(a, b):
    """Return whether two words have the same letters."""
    return sorted(a.lower()) == sorted(b.lower())


def is_palindrome(text):
    """Return whether a text reads the same forwards and backwards."""
    letters = [char for char in text.lower() if char.isalnum()]
    return letters == letters[::-1]


def join_words(words):
    """Return words as a list in English, with commas and the word and."""
    if len(words) < 2:
        return "".join(words)
    return ", ".join(words[:-1]) + " and " + words[-1]


def longest_word(text):
    """Return the longest word of a text."""
    return max(text.split(), key=len)


def most_common_word(text):
    """Return the most common word of a text."""
    return Counter(text.lower().split()).most_common(1)[0][0]


def remove_duplicates(text):
    """Return a text without the lines that came before."""
    seen = set()
    lines = []
    for line in text.splitlines():
        if line not in seen:
            seen.add(line)
            lines.append(line)
    return "\n".join(lines)


def remove_punctuation(text):
    """Return a text without punctuation."""
    return "".join(char for char in text if char not in string.punctuation)


def remove_vowels(text):
    """Return a text without vowels."""
    return "".join(char for char in text if char.lower() not in "aeiou")


def reverse_text(text):
    """Return a text in reverse."""
    return text[::-1]


def reverse_words(text):
    """Return a text with its words in reverse order."""
    return " ".join(reversed(text.split()))


def run_length_encode(text):
    """Return the runs of equal characters in a text, each with its length."""
    runs = []
    for char in text:
        if runs and runs[-1][0] == char:
            runs[-1] = (char, runs[-1][1] + 1)
        else:
            runs.append((char, 1))
    return runs


def slugify(text):
    """Return a text as a part of a URL, in lower case with hyphens."""
    words = re.findall(r"[a-z0-9]+", text.lower())
    return "-".join(words)


def snake_case(name):
    """Return a name in camel case as a name in snake case."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def split_sentences(text):
    """Return the sentences of a text."""
    return [s.strip() for s in re.split(r"(?<=[.!?])\s+", text) if s.strip()]


def swap_case(text):
    """Return a text with capital and small letters swapped."""
    return "".join(char.lower() if char.isupper() else char.upper() for char in text)


def wrap_text(text, width):
    """Return the lines of a text, none longer than a width."""
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] = (lines[-1] + " " + word).strip()
    return lines
