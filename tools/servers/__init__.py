"""Database servers and brokers for tests and benchmarks, apart from the machine's own services."""
