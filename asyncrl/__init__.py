"""asyncrl: asynchronous post-training of language models.

The packages below import downwards only; ``tests/test_layers.py`` holds the order.
"""

__version__ = "0.1.0"
