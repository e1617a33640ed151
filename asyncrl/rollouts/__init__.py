"""Rollouts: samples and groups, staleness slots, the ledger, batch cuts and the packing plan."""
