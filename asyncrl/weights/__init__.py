"""From the trainers' parameters to the engines' weights: publisher, digests, and the vLLM weight-transfer backend."""
