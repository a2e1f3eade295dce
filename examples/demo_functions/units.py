"""Functions for units and money."""


def body_mass_index(weight, height):
    """Return the body mass index of a weight in kilograms and a height in meters."""
    return weight / height**2


def celsius_to_fahrenheit(celsius):
    """Return a temperature in degrees Fahrenheit."""
    return celsius * 9 / 5 + 32


def compound_interest(amount, rate, years):
    """Return an amount of money after some years at an interest rate in percent."""
    return amount * (1 + rate / 100) ** years


def convert_currency(amount, rate):
    """Return an amount of money in another currency."""
    return round(amount * rate, 2)


def discount(price, percent):
    """Return a price reduced by some percent."""
    return price * (1 - percent / 100)


def fahrenheit_to_celsius(fahrenheit):
    """Return a temperature in degrees Celsius."""
    return (fahrenheit - 32) * 5 / 9


def format_bytes(size):
    """Return a number of bytes as text with a unit."""
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1024:
            return f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TB"


def format_money(amount, currency="$"):
    """Return an amount of money as text."""
    return f"{currency}{amount:,.2f}"


def kilometers_to_miles(kilometers):
    """Return a distance in miles."""
    return kilometers / 1.609344


def miles_to_kilometers(miles):
    """Return a distance in kilometers."""
    return miles * 1.609344


def monthly_payment(amount, rate, months):
    """Return the monthly payment for a loan at a yearly rate in percent."""
    monthly = rate / 100 / 12
    return amount * monthly / (1 - (1 + monthly) ** -months)


def price_with_tax(price, rate):
    """Return a price with tax, at a rate in percent."""
    return round(price * (1 + rate / 100), 2)


def seconds_to_hours(seconds):
    """Return a number of seconds in hours."""
    return seconds / 3600


def speed(distance, seconds):
    """Return the speed of a distance in some seconds."""
    return distance / seconds


def split_bill(amount, people, tip=0):
    """Return what each person pays of a bill, with a tip in percent."""
    return round(amount * (1 + tip / 100) / people, 2)
