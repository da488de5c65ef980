"""What things cost. Each module is a program: ``python -m benchmarks.planes --help``."""
