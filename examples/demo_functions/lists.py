"""Functions for lists."""

import random
from collections import Counter, deque


def all_equal(items):
    """Return whether all items of a list are equal."""
    return all(item == items[0] for item in items)


def bubble_sort(items):
    """Return a sorted copy of a list, by bubble sort."""
    items = list(items)
    for end in range(len(items) - 1, 0, -1):
        for i in range(end):
            if items[i] > items[i + 1]:
                items[i], items[i + 1] = items[i + 1], items[i]
    return items


def chunks(items, size):
    """Yield the parts of a list, each of a size."""
    for i in range(0, len(items), size):
        yield items[i : i + size]


def combinations(items):
    """Return all pairs of two items of a list."""
    pairs = []
    for i, first in enumerate(items):
        for second in items[i + 1 :]:
            pairs.append((first, second))
    return pairs


def count_items(items):
    """Return how often each item occurs in a list."""
    counts = {}
    for item in items:
        counts[item] = counts.get(item, 0) + 1
    return counts


def difference(a, b):
    """Return the items of one list that are not in another."""
    return [item for item in a if item not in b]


def drop_none(items):
    """Return a list without the items that are None."""
    return [item for item in items if item is not None]


def find_duplicates(items):
    """Return the items that occur more than once in a list."""
    return [item for item, count in Counter(items).items() if count > 1]


def find_index(items, condition):
    """Return the position of the first item that meets a condition, or -1."""
    for i, item in enumerate(items):
        if condition(item):
            return i
    return -1


def flatten(items):
    """Return the items of nested lists as one list."""
    flat = []
    for item in items:
        if isinstance(item, list):
            flat.extend(flatten(item))
        else:
            flat.append(item)
    return flat


def insertion_sort(items):
    """Return a sorted copy of a list, by insertion sort."""
    result = []
    for item in items:
        i = len(result)
        while i > 0 and result[i - 1] > item:
            i -= 1
        result.insert(i, item)
    return result


def interleave(a, b):
    """Return the items of two lists in turns."""
    result = []
    for x, y in zip(a, b):
        result += [x, y]
    return result


def intersection(a, b):
    """Return the items that are in both of two lists."""
    return [item for item in a if item in b]


def is_sorted(items):
    """Return whether a list is sorted."""
    return all(a <= b for a, b in zip(items, items[1:]))


def largest(items, n):
    """Return the n largest items of a list."""
    return sorted(items, reverse=True)[:n]


def last_item(items, default=None):
    """Return the last item of a list, or a default if it is empty."""
    return items[-1] if items else default


def merge_sort(items):
    """Return a sorted copy of a list, by merge sort."""
    if len(items) < 2:
        return list(items)
    middle = len(items) // 2
    return merge_sorted(merge_sort(items[:middle]), merge_sort(items[middle:]))


def merge_sorted(a, b):
    """Return the items of two sorted lists as one sorted list."""
    result = []
    i = j = 0
    while i < len(a) and j < len(b):
        if a[i] <= b[j]:
            result.append(a[i])
            i += 1
        else:
            result.append(b[j])
            j += 1
    return result + a[i:] + b[j:]


def most_common(items):
    """Return the most common item of a list."""
    return Counter(items).most_common(1)[0][0]


def move_to_front(items, item):
    """Return a list with an item moved to the front."""
    return [item] + [other for other in items if other != item]


def pairs(items):
    """Return each item of a list with the one after it."""
    return list(zip(items, items[1:]))


def partition(items, condition):
    """Return the items that meet a condition, and the others."""
    yes, no = [], []
    for item in items:
        if condition(item):
            yes.append(item)
        else:
            no.append(item)
    return yes, no


def permutations(items):
    """Return all orders of the items of a list."""
    if len(items) < 2:
        return [list(items)]
    orders = []
    for i, first in enumerate(items):
        for rest in permutations(items[:i] + items[i + 1 :]):
            orders.append([first] + rest)
    return orders


def quick_sort(items):
    """Return a sorted copy of a list, by quick sort."""
    if len(items) < 2:
        return list(items)
    pivot = items[0]
    smaller = [item for item in items[1:] if item < pivot]
    others = [item for item in items[1:] if item >= pivot]
    return quick_sort(smaller) + [pivot] + quick_sort(others)


def remove_item(items, item):
    """Return a list without an item."""
    return [other for other in items if other != item]


def rotate(items, n):
    """Return a list moved to the left by n places."""
    queue = deque(items)
    queue.rotate(-n)
    return list(queue)


def sample(items, n):
    """Return n random items of a list."""
    return random.sample(items, n)


def second_largest(items):
    """Return the second largest item of a list."""
    return sorted(set(items))[-2]


def selection_sort(items):
    """Return a sorted copy of a list, by selection sort."""
    items = list(items)
    for i in range(len(items)):
        smallest = min(range(i, len(items)), key=items.__getitem__)
        items[i], items[smallest] = items[smallest], items[i]
    return items


def shuffle(items):
    """Return a copy of a list in random order."""
    items = list(items)
    random.shuffle(items)
    return items


def split_list(items, separator):
    """Return the parts of a list between separators."""
    parts = [[]]
    for item in items:
        if item == separator:
            parts.append([])
        else:
            parts[-1].append(item)
    return parts


def unique(items):
    """Return a list without duplicates, in the same order."""
    seen = set()
    result = []
    for item in items:
        if item not in seen:
            seen.add(item)
            result.append(item)
    return result


def windows(items, size):
    """Return all parts of a list of a size, one for each position."""
    return [items[i : i + size] for i in range(len(items) - size + 1)]
