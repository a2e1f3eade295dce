"""Functions for graphs, matrices and points."""

import heapq
import math
from collections import deque


def add_matrices(a, b):
    """Return the sum of two matrices."""
    return [[x + y for x, y in zip(row, other)] for row, other in zip(a, b)]


def breadth_first(graph, start):
    """Return the nodes of a graph in the order of their distance from a node."""
    order, queue = [start], deque([start])
    while queue:
        for node in graph[queue.popleft()]:
            if node not in order:
                order.append(node)
                queue.append(node)
    return order


def center(points):
    """Return the mean of points in the plane."""
    n = len(points)
    return sum(x for x, _ in points) / n, sum(y for _, y in points) / n


def depth_first(graph, node, seen=None):
    """Return the nodes that can be reached from a node."""
    seen = set() if seen is None else seen
    seen.add(node)
    for other in graph[node]:
        if other not in seen:
            depth_first(graph, other, seen)
    return seen


def distance(a, b):
    """Return the distance of two points in the plane."""
    return math.hypot(a[0] - b[0], a[1] - b[1])


def dot_product(a, b):
    """Return the dot product of two vectors."""
    return sum(x * y for x, y in zip(a, b))


def has_path(graph, start, end):
    """Return whether there is a path between two nodes of a graph."""
    queue, seen = [start], {start}
    while queue:
        node = queue.pop()
        if node == end:
            return True
        for other in graph[node]:
            if other not in seen:
                seen.add(other)
                queue.append(other)
    return False


def identity_matrix(n):
    """Return the identity matrix of n rows."""
    return [[int(i == j) for j in range(n)] for i in range(n)]


def matrix_product(a, b):
    """Return the product of two matrices."""
    columns = list(zip(*b))
    return [[sum(x * y for x, y in zip(row, column)) for column in columns] for row in a]


def nearest(point, points):
    """Return the nearest of some points to a point."""
    return min(points, key=lambda other: math.dist(point, other))


def neighbors(row, column, height, width):
    """Return the cells of a grid beside a cell."""
    cells = [(row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)]
    return [(i, j) for i, j in cells if 0 <= i < height and 0 <= j < width]


def shortest_distances(graph, start):
    """Return the distance of each node from a node, by Dijkstra's algorithm."""
    distances = {start: 0}
    queue = [(0, start)]
    while queue:
        length, node = heapq.heappop(queue)
        if length > distances[node]:
            continue
        for other, weight in graph[node].items():
            if length + weight < distances.get(other, math.inf):
                distances[other] = length + weight
                heapq.heappush(queue, (length + weight, other))
    return distances


def topological_sort(graph):
    """Return the nodes of a graph so that each comes before those it points to."""
    order, seen = [], set()

    def visit(node):
        if node not in seen:
            seen.add(node)
            for other in graph[node]:
                visit(other)
            order.append(node)

    for node in graph:
        visit(node)
    return order[::-1]


def transpose(matrix):
    """Return a matrix with rows and columns swapped."""
    return [list(column) for column in zip(*matrix)]


def vector_length(vector):
    """Return the length of a vector."""
    return math.sqrt(sum(x * x for x in vector))
