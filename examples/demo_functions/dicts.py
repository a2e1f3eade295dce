"""Functions for dictionaries."""

import json
from collections import defaultdict


def count_by(items, key):
    """Return how many items have each value of a key."""
    counts = {}
    for item in items:
        value = item[key]
        counts[value] = counts.get(value, 0) + 1
    return counts


def deep_get(data, path, default=None):
    """Return the value in nested dictionaries at a path of keys with dots."""
    for key in path.split("."):
        if not isinstance(data, dict) or key not in data:
            return default
        data = data[key]
    return data


def filter_dict(data, condition):
    """Return the entries of a dictionary whose values meet a condition."""
    return {key: value for key, value in data.items() if condition(value)}


def flatten_dict(data, prefix=""):
    """Return nested dictionaries as one, with dots in the keys."""
    flat = {}
    for key, value in data.items():
        if isinstance(value, dict):
            flat.update(flatten_dict(value, prefix + key + "."))
        else:
            flat[prefix + key] = value
    return flat


def from_pairs(pairs):
    """Return a dictionary of keys and values."""
    return {key: value for key, value in pairs}


def group_by(items, key):
    """Return lists of the items with the same value of a key."""
    groups = defaultdict(list)
    for item in items:
        groups[item[key]].append(item)
    return dict(groups)


def has_keys(data, keys):
    """Return whether a dictionary has all of some keys."""
    return all(key in data for key in keys)


def invert(data):
    """Return a dictionary with keys and values swapped."""
    return {value: key for key, value in data.items()}


def key_of_largest(data):
    """Return the key with the largest value."""
    return max(data, key=data.get)


def map_values(data, function):
    """Return a dictionary with a function applied to each value."""
    return {key: function(value) for key, value in data.items()}


def merge_dicts(*dicts):
    """Return several dictionaries as one."""
    result = {}
    for data in dicts:
        result.update(data)
    return result


def omit(data, keys):
    """Return a dictionary without some keys."""
    return {key: value for key, value in data.items() if key not in keys}


def pick(data, keys):
    """Return a dictionary with only some keys."""
    return {key: data[key] for key in keys if key in data}


def pluck(items, key):
    """Return the values of a key in a list of dictionaries."""
    return [item[key] for item in items]


def rename_key(data, old, new):
    """Return a dictionary with a key renamed."""
    return {new if key == old else key: value for key, value in data.items()}


def sort_by(items, key):
    """Return a list of dictionaries sorted by a key."""
    return sorted(items, key=lambda item: item[key])


def sort_by_value(data):
    """Return the entries of a dictionary sorted by value, the largest first."""
    return sorted(data.items(), key=lambda entry: entry[1], reverse=True)


def sum_by(items, key, value):
    """Return the sums of a value for each value of a key."""
    sums = defaultdict(float)
    for item in items:
        sums[item[key]] += item[value]
    return dict(sums)


def to_json(data):
    """Return a dictionary as JSON."""
    return json.dumps(data, indent=2, sort_keys=True)


def to_pairs(data):
    """Return the keys and values of a dictionary."""
    return list(data.items())


def update_counts(counts, items):
    """Add items to a dictionary of counts."""
    for item in items:
        counts[item] = counts.get(item, 0) + 1
    return counts
