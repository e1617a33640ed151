"""One file per claim: ``python -m benchmarks.NAME [--quick] [--json FILE]``."""
