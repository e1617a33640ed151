"""Many adapters trained at once on one frozen base: what a pack costs, and which jobs are packed when."""
