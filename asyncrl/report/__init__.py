"""What a run tells its user: metrics file, summary, console, Weights & Biases. ``Reporter`` is the one entry."""
