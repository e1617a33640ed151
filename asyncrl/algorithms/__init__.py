"""Advantages (numpy, on the controller) and losses (torch, on the trainer)."""
