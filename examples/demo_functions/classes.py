"""Small classes."""

import heapq
import time


class BankAccount:
    """An account with a balance."""

    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        """Add an amount to the balance."""
        self.balance += amount

    def withdraw(self, amount):
        """Take an amount from the balance."""
        if amount > self.balance:
            raise ValueError("not enough money")
        self.balance -= amount


class Cache:
    """A dictionary that keeps the entries used last."""

    def __init__(self, size):
        self.size = size
        self.entries = {}

    def get(self, key, default=None):
        """Return the value of a key."""
        if key not in self.entries:
            return default
        value = self.entries.pop(key)
        self.entries[key] = value
        return value

    def set(self, key, value):
        """Set the value of a key, and forget the oldest entry if there are too many."""
        self.entries.pop(key, None)
        self.entries[key] = value
        if len(self.entries) > self.size:
            oldest = next(iter(self.entries))
            del self.entries[oldest]


class Circle:
    """A circle with a radius."""

    def __init__(self, radius):
        self.radius = radius

    def area(self):
        """Return the area of the circle."""
        return 3.14159 * self.radius**2

    def circumference(self):
        """Return the circumference of the circle."""
        return 2 * 3.14159 * self.radius


class Counter:
    """A counter that can be increased and reset."""

    def __init__(self):
        self.value = 0

    def increase(self, n=1):
        """Add n to the counter."""
        self.value += n
        return self.value

    def reset(self):
        """Set the counter to 0."""
        self.value = 0


class LinkedList:
    """A list of nodes that each know the next one."""

    def __init__(self):
        self.head = None
        self.length = 0

    def __len__(self):
        return self.length

    def __iter__(self):
        node = self.head
        while node is not None:
            yield node.value
            node = node.next

    def push(self, value):
        """Add a value at the front."""
        self.head = Node(value, self.head)
        self.length += 1

    def pop(self):
        """Remove and return the value at the front."""
        if self.head is None:
            raise IndexError("pop from an empty list")
        node = self.head
        self.head = node.next
        self.length -= 1
        return node.value


class Matrix:
    """A matrix of rows of numbers."""

    def __init__(self, rows):
        self.rows = rows

    def __add__(self, other):
        return Matrix([[a + b for a, b in zip(x, y)] for x, y in zip(self.rows, other.rows)])

    def transpose(self):
        """Return the matrix with rows and columns swapped."""
        return Matrix([list(column) for column in zip(*self.rows)])


class Node:
    """A value and the node after it."""

    def __init__(self, value, next=None):
        self.value = value
        self.next = next


class Person:
    """A person with a name and an age."""

    def __init__(self, name, age):
        self.name = name
        self.age = age

    def __repr__(self):
        return f"Person({self.name!r}, {self.age})"

    def is_adult(self):
        """Return whether the person is 18 or older."""
        return self.age >= 18


class Point:
    """A point in the plane."""

    def __init__(self, x, y):
        self.x = x
        self.y = y

    def __add__(self, other):
        return Point(self.x + other.x, self.y + other.y)

    def __eq__(self, other):
        return self.x == other.x and self.y == other.y

    def distance(self, other):
        """Return the distance to another point."""
        return ((self.x - other.x) ** 2 + (self.y - other.y) ** 2) ** 0.5


class PriorityQueue:
    """A queue that returns the item with the lowest priority first."""

    def __init__(self):
        self.items = []

    def __len__(self):
        return len(self.items)

    def push(self, item, priority):
        """Add an item with a priority."""
        heapq.heappush(self.items, (priority, item))

    def pop(self):
        """Remove and return the item with the lowest priority."""
        _, item = heapq.heappop(self.items)
        return item


class Queue:
    """A first in, first out queue."""

    def __init__(self):
        self.items = []

    def __len__(self):
        return len(self.items)

    def put(self, item):
        """Add an item at the end."""
        self.items.append(item)

    def get(self):
        """Remove and return the item at the front."""
        if not self.items:
            raise IndexError("get from an empty queue")
        return self.items.pop(0)


class Rectangle:
    """A rectangle with a width and a height."""

    def __init__(self, width, height):
        self.width = width
        self.height = height

    def area(self):
        """Return the area of the rectangle."""
        return self.width * self.height

    def perimeter(self):
        """Return the perimeter of the rectangle."""
        return 2 * (self.width + self.height)

    def is_square(self):
        """Return whether all sides are equal."""
        return self.width == self.height


class Stack:
    """A last in, first out stack."""

    def __init__(self):
        self.items = []

    def __len__(self):
        return len(self.items)

    def push(self, item):
        """Add an item at the top."""
        self.items.append(item)

    def pop(self):
        """Remove and return the item at the top."""
        if not self.items:
            raise IndexError("pop from an empty stack")
        return self.items.pop()

    def peek(self):
        """Return the item at the top."""
        return self.items[-1]


class Timer:
    """A timer for a block of code."""

    def __enter__(self):
        self.start = time.perf_counter()
        return self

    def __exit__(self, *args):
        self.seconds = time.perf_counter() - self.start


class Tree:
    """A binary search tree."""

    def __init__(self, value):
        self.value = value
        self.left = None
        self.right = None

    def insert(self, value):
        """Add a value to the tree."""
        if value < self.value:
            if self.left is None:
                self.left = Tree(value)
            else:
                self.left.insert(value)
        elif self.right is None:
            self.right = Tree(value)
        else:
            self.right.insert(value)

    def contains(self, value):
        """Return whether a value is in the tree."""
        if value == self.value:
            return True
        child = self.left if value < self.value else self.right
        return child is not None and child.contains(value)

    def values(self):
        """Yield the values in order."""
        if self.left is not None:
            yield from self.left.values()
        yield self.value
        if self.right is not None:
            yield from self.right.values()
