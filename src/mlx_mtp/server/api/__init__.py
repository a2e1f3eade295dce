"""The APIs, a file for each: it parses requests and writes answers, and does not depend on HTTP."""
