"""HTTP: routes, answers, connections, limits."""
