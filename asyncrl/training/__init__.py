"""Trainer ranks: model, attention by document, log-prob head, sharding, optimizer, step and checkpoint."""
