"""Functions for dates and times."""

import calendar
import time
from datetime import date, datetime, timedelta


def add_days(day, n):
    """Return the date n days after a date."""
    return day + timedelta(days=n)


def age(birthday, today=None):
    """Return the age in years of a person with a birthday."""
    today = today or date.today()
    had_birthday = (today.month, today.day) >= (birthday.month, birthday.day)
    return today.year - birthday.year - (not had_birthday)


def date_range(start, end):
    """Yield the dates from start to end."""
    day = start
    while day <= end:
        yield day
        day += timedelta(days=1)


def days_between(start, end):
    """Return the number of days between two dates."""
    return abs((end - start).days)


def days_in_month(year, month):
    """Return the number of days of a month."""
    return calendar.monthrange(year, month)[1]


def days_until(day, today=None):
    """Return the number of days until a date."""
    return (day - (today or date.today())).days


def first_of_month(day):
    """Return the first day of a date's month."""
    return day.replace(day=1)


def format_date(day):
    """Return a date as text, with year, month and day."""
    return day.strftime("%Y-%m-%d")


def format_duration(seconds):
    """Return a number of seconds as hours, minutes and seconds."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"


def is_weekend(day):
    """Return whether a date is a Saturday or a Sunday."""
    return day.weekday() >= 5


def last_of_month(day):
    """Return the last day of a date's month."""
    return day.replace(day=calendar.monthrange(day.year, day.month)[1])


def measure_time(function, *args):
    """Return the result of a function and the seconds it took."""
    start = time.perf_counter()
    result = function(*args)
    return result, time.perf_counter() - start


def month_name(month):
    """Return the name of a month."""
    return calendar.month_name[month]


def next_weekday(day, weekday):
    """Return the next date on a weekday, 0 for Monday."""
    days = (weekday - day.weekday() - 1) % 7 + 1
    return day + timedelta(days=days)


def parse_date(text):
    """Return the date in a text with year, month and day."""
    year, month, day = text.split("-")
    return date(int(year), int(month), int(day))


def parse_duration(text):
    """Return the seconds of a text with hours, minutes and seconds."""
    seconds = 0
    for part in text.split(":"):
        seconds = 60 * seconds + int(part)
    return seconds


def parse_time(text):
    """Return the hour and minute in a text."""
    hour, minute = text.split(":")
    return int(hour), int(minute)


def quarter(day):
    """Return the quarter of the year of a date, from 1 to 4."""
    return (day.month - 1) // 3 + 1


def start_of_week(day):
    """Return the Monday of a date's week."""
    return day - timedelta(days=day.weekday())


def timestamp():
    """Return the time now as text."""
    return datetime.now().strftime("%Y-%m-%d %H:%M:%S")


def weekday_name(day):
    """Return the name of a date's weekday."""
    return calendar.day_name[day.weekday()]


def working_days(start, end):
    """Return the number of days from Monday to Friday between two dates."""
    n = 0
    while start <= end:
        n += start.weekday() < 5
        start += timedelta(days=1)
    return n


def yesterday():
    """Return the date of yesterday."""
    return date.today() - timedelta(days=1)
