"""Data: messages, chat templates, masks, local model folders."""
