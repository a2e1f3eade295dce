"""Functions for numbers."""

import math
import random


def average(values):
    """Return the mean of numbers, or 0 if there are none."""
    if not values:
        return 0
    return sum(values) / len(values)


def binary_search(values, target):
    """Return the position of a value in a sorted list, or -1."""
    low, high = 0, len(values) - 1
    while low <= high:
        middle = (low + high) // 2
        if values[middle] == target:
            return middle
        if values[middle] < target:
            low = middle + 1
        else:
            high = middle - 1
    return -1


def clamp(value, low, high):
    """Return a value limited to a range."""
    return max(low, min(value, high))


def collatz(n):
    """Return the steps from a number to 1: half of an even one, three times an odd one plus 1."""
    steps = [n]
    while n != 1:
        n = n // 2 if n % 2 == 0 else 3 * n + 1
        steps.append(n)
    return steps


def count_digits(n):
    """Return the number of digits of an integer."""
    return len(str(abs(n)))


def cumulative_sum(values):
    """Return the running total of numbers."""
    total, result = 0, []
    for value in values:
        total += value
        result.append(total)
    return result


def digit_sum(n):
    """Return the sum of the digits of an integer."""
    return sum(int(digit) for digit in str(abs(n)))


def divisors(n):
    """Return the divisors of a number."""
    return [i for i in range(1, n + 1) if n % i == 0]


def factorial(n):
    """Return the product of the numbers from 1 to n."""
    result = 1
    for i in range(2, n + 1):
        result *= i
    return result


def fibonacci(n):
    """Return the first n Fibonacci numbers."""
    numbers = []
    a, b = 0, 1
    for _ in range(n):
        numbers.append(a)
        a, b = b, a + b
    return numbers


def from_binary(text):
    """Return the number that a text of zeros and ones stands for."""
    number = 0
    for digit in text:
        number = 2 * number + int(digit)
    return number


def greatest_common_divisor(a, b):
    """Return the greatest common divisor of two numbers."""
    while b:
        a, b = b, a % b
    return a


def is_even(n):
    """Return whether a number is even."""
    return n % 2 == 0


def is_leap_year(year):
    """Return whether a year has 366 days."""
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


def is_perfect_square(n):
    """Return whether a number is the square of an integer."""
    return math.isqrt(n) ** 2 == n


def is_power_of_two(n):
    """Return whether a number is a power of two."""
    return n > 0 and n & (n - 1) == 0


def is_prime(n):
    """Return whether a number is prime."""
    if n < 2:
        return False
    for i in range(2, math.isqrt(n) + 1):
        if n % i == 0:
            return False
    return True


def least_common_multiple(a, b):
    """Return the least common multiple of two numbers."""
    return a * b // math.gcd(a, b)


def median(values):
    """Return the median of numbers."""
    values = sorted(values)
    middle = len(values) // 2
    if len(values) % 2 == 1:
        return values[middle]
    return (values[middle - 1] + values[middle]) / 2


def moving_average(values, n):
    """Return the means of each n numbers in a row."""
    return [sum(values[i : i + n]) / n for i in range(len(values) - n + 1)]


def normalize(values):
    """Return numbers scaled to the range from 0 to 1."""
    low, high = min(values), max(values)
    return [(value - low) / (high - low) for value in values]


def percentage(part, total):
    """Return a part of a total in percent."""
    return 100 * part / total


def prime_factors(n):
    """Return the prime factors of a number."""
    factors = []
    divisor = 2
    while n > 1:
        while n % divisor == 0:
            factors.append(divisor)
            n //= divisor
        divisor += 1
    return factors


def primes(n):
    """Return the prime numbers up to n."""
    is_prime = [True] * (n + 1)
    for i in range(2, math.isqrt(n) + 1):
        if is_prime[i]:
            for j in range(i * i, n + 1, i):
                is_prime[j] = False
    return [i for i in range(2, n + 1) if is_prime[i]]


def quadratic_roots(a, b, c):
    """Return the real roots of a quadratic equation."""
    discriminant = b * b - 4 * a * c
    if discriminant < 0:
        return []
    root = math.sqrt(discriminant)
    return sorted({(-b - root) / (2 * a), (-b + root) / (2 * a)})


def random_integers(n, low, high):
    """Return n random integers in a range."""
    return [random.randint(low, high) for _ in range(n)]


def round_to(value, step):
    """Return the multiple of a step that is nearest to a value."""
    return step * round(value / step)


def square_root(x):
    """Return the square root of a number, by Newton's method."""
    guess = x / 2 or 1.0
    while abs(guess * guess - x) > 1e-9:
        guess = (guess + x / guess) / 2
    return guess


def standard_deviation(values):
    """Return the standard deviation of numbers."""
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))


def sum_of_squares(values):
    """Return the sum of the squares of numbers."""
    return sum(value * value for value in values)


def to_binary(n):
    """Return a number as a text of zeros and ones."""
    digits = ""
    while n > 0:
        digits = str(n % 2) + digits
        n //= 2
    return digits or "0"


def to_roman(n):
    """Return a number as a Roman numeral."""
    numerals = [(1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC")]
    numerals += [(50, "L"), (40, "XL"), (10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I")]
    result = ""
    for value, numeral in numerals:
        while n >= value:
            result += numeral
            n -= value
    return result
