"""What clients speak: a file for each API, which reads its requests and writes its answers, and knows nothing of HTTP."""
