"""Functions that check a value."""

import re


def is_email(text):
    """Return whether a text is an email address."""
    return re.fullmatch(r"[\w.+-]+@[\w-]+(\.[\w-]+)+", text) is not None


def is_hex_color(text):
    """Return whether a text is a color, as # and six digits."""
    return re.fullmatch(r"#[0-9a-fA-F]{6}", text) is not None


def is_ip_address(text):
    """Return whether a text is an IP address of four numbers."""
    parts = text.split(".")
    return len(parts) == 4 and all(part.isdigit() and int(part) < 256 for part in parts)


def is_number(text):
    """Return whether a text is a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def is_phone_number(text):
    """Return whether a text is a phone number."""
    digits = re.sub(r"[ ()+-]", "", text)
    return digits.isdigit() and 7 <= len(digits) <= 15


def is_strong_password(password):
    """Return whether a password has eight characters, with a capital, a small letter and a digit."""
    has_upper = any(char.isupper() for char in password)
    has_lower = any(char.islower() for char in password)
    has_digit = any(char.isdigit() for char in password)
    return len(password) >= 8 and has_upper and has_lower and has_digit


def is_url(text):
    """Return whether a text is a web address."""
    return text.startswith(("http://", "https://"))


def is_valid_date(text):
    """Return whether a text is a date with year, month and day."""
    match = re.fullmatch(r"(\d{4})-(\d{2})-(\d{2})", text)
    return match is not None and 1 <= int(match[2]) <= 12 and 1 <= int(match[3]) <= 31


def is_valid_name(name):
    """Return whether a text can be the name of a variable."""
    return re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) is not None


def luhn_check(number):
    """Return whether a card number is valid."""
    total = 0
    for i, digit in enumerate(reversed(number)):
        n = int(digit)
        if i % 2 == 1:
            n = 2 * n - 9 if n > 4 else 2 * n
        total += n
    return total % 10 == 0


def parse_bool(text):
    """Return the truth value that a text stands for."""
    return text.strip().lower() in ("1", "true", "yes", "on")


def parse_int(text, default=None):
    """Return the integer in a text, or a default if there is none."""
    try:
        return int(text)
    except ValueError:
        return default


def require(value, name):
    """Return a value, or raise an error if it is missing."""
    if value is None:
        raise ValueError(f"{name} is missing")
    return value
