"""Typed configuration. Nothing in this package imports torch or vLLM, so a bad key costs no start-up."""
